"""Redis as a target: what it needs from a server, and that no line has a row or a password."""

import re
import signal
import threading
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from cli import outcome
from limits import suspend, until
from services import client_of, free_port, service_of
from stores import config_of, frame, open_store, rows_of

import penstock as ps
import penstock.contrib.targets.redis_hashes as redis_hashes
from penstock.base.errors import UsageError
from penstock.serving.followers.target import FollowedJob, Stored, TableForm, TableRows
from penstock.serving.followers.target_kinds import open_target

PAGE = Path(__file__).parents[3] / "docs/targets.md"
RULES = re.findall(r"[~+]\S+", " ".join(re.findall(r"^ACL SETUSER penstock .*", PAGE.read_text(), re.MULTILINE)))
PASSWORD = "hun/ter#2?@[x]"
JOB = FollowedJob("a", {"user": TableForm(2)})
ROWS = TableRows("user", np.arange(3_000), np.full((3_000, 2), 7, np.float32), np.arange(0))
NEW = Stored(JOB, ps.Version("a-0-1"))


@pytest.fixture
def store(tmp_path):
    with open_store("redis", tmp_path) as opened:
        yield opened


def limit(store, rules):
    """Give the user of the page these rights, and return the URI with it."""
    store.client.execute_command("ACL", "SETUSER", "penstock", "reset", "on", f">{PASSWORD}", *rules)
    return f"redis://penstock:{quote(PASSWORD, safe='')}@127.0.0.1:{store.port}/0"


def written(uri):
    """Write a table, as a follower does."""
    target = open_target(uri)
    try:
        with target.failures():
            target.stored()
            target.replace(NEW, [ROWS], None)
            return target.stored()
    finally:
        target.close()


def test_a_user_with_the_rights_of_the_page_follows(store, capsys):
    uri = limit(store, RULES)
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        for end in (0, 10, 40):
            client.put([frame(step) for step in range(end)], "w0", first=1)
            code, done, text = outcome(capsys, "follow", service.address.uri, "--into", uri, "--once")
            assert code == 0, text
            assert done["full_copies"] == (end == 0)
        assert done["removed"] > 0
        assert store.read() == rows_of(service.engine)
    keys = store.client.keys()
    assert all(store.client.ttl(key) == -1 for key in keys)


def test_a_right_that_is_missing_ends_with_2_and_leaves_nothing(store):
    for rule in RULES:
        uri = limit(store, [each for each in RULES if each != rule])
        with pytest.raises(
            UsageError, match=r"^redis://127.0.0.1:\d+/0: .*no permissions.* lists the commands and keys"
        ):
            written(uri)
        assert store.client.keys() == [], rule


def test_a_right_that_is_taken_away_later_leaves_the_last_transaction(store):
    target = open_target(limit(store, RULES))
    target.replace(NEW, [ROWS], None)
    for rule in ("+multi", "+exec", "+hdel"):
        limit(store, [each for each in RULES if each != rule])
        with pytest.raises(UsageError, match="no permissions"), target.failures():
            target.apply(Stored(JOB, ps.Version("a-0-2")), [], NEW)
        assert store.step() == 1
    target.close()


@pytest.mark.parametrize("command", ["MULTI", "EXEC", "WATCH", "EXPIRE"])
def test_a_server_without_transactions_is_refused_before_the_first_write(command, tmp_path, capsys):
    with open_store("redis", tmp_path, "--rename-command", command, "") as store, service_of() as service:
        code, done, line = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
        assert code == done["exit_code"] == 2
        assert f"unknown command '{command}'" in line
        assert "penstock writes only in transactions" in line
        assert "args beginning" not in line
        assert store.client.keys() == []


def test_a_cluster_is_refused_by_name(tmp_path):
    # By default the bus of a cluster has the port of the server plus 10,000, which may be above 65,535.
    bus = ("--cluster-port", str(free_port()))
    options = ("--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf"), *bus)
    with open_store("redis", tmp_path, *options) as store:
        with pytest.raises(
            UsageError, match="Hash slot not served; this is a Redis Cluster, which is not a target; give"
        ):
            written(store.target)
        store.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in store.client.execute_command("CLUSTER", "INFO"))
        with pytest.raises(UsageError, match="the same slot; this is a Redis Cluster, which is not a target; give"):
            written(store.target)


def test_a_fill_that_ends_at_any_moment_leaves_no_hash_that_stays(store, monkeypatch):
    monkeypatch.setattr(redis_hashes, "PIPELINE_FIELDS", 1_000)
    execute = store.redis.client.Pipeline.execute
    monkeypatch.setattr(store.redis.Redis, "unlink", lambda *_: None)  # as after a kill
    for number in range(5):
        calls = iter(range(100))

        def ends(pipe, *arguments, calls=calls, number=number):
            if next(calls) == number:
                raise KeyboardInterrupt
            return execute(pipe, *arguments)

        monkeypatch.setattr(store.redis.client.Pipeline, "execute", ends)
        with pytest.raises(KeyboardInterrupt):
            open_target(store.target).replace(NEW, [ROWS], None)
        keys = store.client.keys()
        assert len(keys) == number
        assert all(0 < store.client.ttl(key) <= 600 for key in keys)


def test_a_key_of_another_type_is_found_before_the_step_changes(store):
    target = open_target(store.target)
    target.replace(NEW, [ROWS], None)
    store.client.set("penstock:user", "text")
    with pytest.raises(UsageError, match=r"wrong kind of value; check the database in the URI$"), target.failures():
        target.apply(Stored(JOB, ps.Version("a-0-2")), [ROWS], NEW)
    target.close()
    assert (store.step(), store.client.get("penstock:user")) == (1, b"text")


@pytest.mark.parametrize(
    "option", ["decode_responses=True", "encoding=latin-1", "socket_timeout=1", "max_connections=1", "retry_on_error=x"]
)
def test_an_option_that_would_break_the_target_is_named(option, refused):
    pytest.importorskip("redis")
    name = option.partition("=")[0]
    line = refused(2, "follow", "grpc://127.0.0.1:1", "--into", f"redis://u:pw@127.0.0.1/0?{option}")
    assert line.startswith(
        f"penstock: redis://127.0.0.1/0: '{name}' cannot be set in the URI; expected client_name, db,"
    )


@pytest.mark.parametrize("option", ["db=x", "protocol=9", "ssl_cert_reqs=some", "ssl_ca_certs=/none/ca.pem"])
def test_a_value_of_an_option_that_is_wrong_is_exit_2(option, refused):
    pytest.importorskip("redis")
    for scheme in ("redis", "rediss"):
        line = refused(2, "follow", "grpc://127.0.0.1:1", "--into", f"{scheme}://u:hunzqx@127.0.0.1/0?{option}")
        assert line.startswith(f"penstock: {scheme}://127.0.0.1/")
        assert "hunzqx" not in line


@pytest.mark.promise("No error prints a password or a token")
@pytest.mark.parametrize("password", ["hun#zqx", "hun/zqx", "hun@zqx", "hun?zqx", "1234/zqx", "12/3?zqx=4"])
def test_a_password_that_splits_the_uri_is_refused_and_not_printed(password, refused):
    for scheme, host in (("redis", "host:6379/0"), ("rediss", "host"), ("unix", "/tmp/x")):
        line = refused(2, "follow", "grpc://127.0.0.1:1", "--into", f"{scheme}://user:{password}@{host}")
        assert line.startswith(f"penstock: {scheme}://…: expected redis://USER:PASSWORD@HOST:PORT/DATABASE; write the ")
        assert not re.search("hun|zqx|1234", line)


def test_a_flag_that_does_not_fit_prints_no_password(refused, tmp_path):
    for words in (["redis://u:hunzqx@h/0", "--state", tmp_path / "s"], ["redis:u:hunzqx@h/0"]):
        assert "hunzqx" not in refused(2, "follow", "grpc://127.0.0.1:1", "--into", *words)


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("redis://:p%40w@10.0.0.1:7000/3", "redis://10.0.0.1:7000/3"),
        ("rediss://u:pw@store.example?db=2&ssl_cert_reqs=none", "rediss://store.example/2"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("unix://u:pw@/run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1"),
    ],
)
def test_lines_have_the_address_and_nothing_else_of_the_uri(uri, name):
    pytest.importorskip("redis")
    assert open_target(uri).name == name


def test_tls_to_a_port_without_it_ends_within_patience(store, capsys):
    with service_of() as service:
        uri = store.target.replace("redis://", "rediss://")
        code, _, line = outcome(
            capsys, "follow", service.address.uri, "--into", uri, "--once", "--patience", "0.5", "--log-level", "error"
        )
    assert code in (2, 6)  # whether the server answers depends on the random bytes of the handshake
    assert re.search("does the server use TLS at this port|use the address without TLS", line)


def test_a_wait_for_a_server_that_does_not_answer_ends_at_a_signal(tmp_path, monkeypatch):
    def stop():
        if threading.current_thread() is threading.main_thread():  # an earlier test's thread may still retry something
            raise KeyboardInterrupt

    with open_store("redis", tmp_path) as store:
        target = store.open_target()
        target.stored()
        suspend(store.process)
        monkeypatch.setattr(redis_hashes.interrupts, "check", stop)
        with pytest.raises(KeyboardInterrupt), target.failures():
            target.stored()
        store.process.send_signal(signal.SIGCONT)
        monkeypatch.undo()
        assert target.stored() is None  # over a new connection, which the answer to the other one cannot reach
        target.close()
