"""``penstock follow`` into every store: the store equals the tables, after deltas, gaps, kills and restarts."""

import json
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from batches import batch
from cli import outcome, started
from limits import HANG_S, suspend, until
from services import Process, client_of, connect, free_port, service_of
from stores import DIM, DYNAMIC, ITEMS, KEYS, STORES, Kafka, Redis, config_of, frame, open_store, rows_of

import penstock as ps
from penstock.base.errors import InputError
from penstock.contrib.targets import kafka_topic, lmdb_file
from penstock.serving.flight import Client
from penstock.serving.flight.connection import Connection
from penstock.serving.followers.follower import Follower
from penstock.serving.service.limits import Limits

FRAMES = [frame(step) for step in range(60)]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    with open_store(request.param, tmp_path) as target:
        yield target


def follow(capsys, address, store, *flags):
    """Follow until the store is current. Returns what the command prints."""
    code, printed, text = outcome(capsys, "follow", address, "--into", store.target, "--once", *flags)
    assert code == 0, text
    return printed


@pytest.mark.parametrize("durable", [False, True])
def test_a_store_equals_the_tables(store, durable, tmp_path, capsys):
    saving = {"folder": tmp_path / "c", "every": 7} if durable else {"per_steps": 3}
    with service_of(ps.Engine(config_of()), **saving) as service, client_of(service) as client:
        first = follow(capsys, service.address.uri, store)
        assert (first["full_copies"], first["deltas"], first["step"]) == (1, 0, 0)
        client.put(FRAMES[:31], "w0")
        for end in (32, 60):
            client.put(FRAMES[:end], "w0", first=1)
            done = follow(capsys, service.address.uri, store)
            assert (done["full_copies"], done["step"]) == (0, end)
            assert done["transactions"] == (done["deltas"] if isinstance(store, Kafka) else 1)
            assert store.step() == end
            assert store.read() == rows_of(service.engine)
        assert done["removed"] > 0
        assert follow(capsys, service.address.uri, store)["transactions"] == 0


def test_after_a_gap_the_follower_writes_a_full_copy(store, capsys):
    with (
        service_of(ps.Engine(config_of()), per_steps=1, limits=Limits(delta_bytes=4000)) as service,
        client_of(service) as client,
    ):
        client.put(FRAMES[:5], "w0")
        follow(capsys, service.address.uri, store)
        client.put(FRAMES, "w0", first=1)
        done = follow(capsys, service.address.uri, store)
        assert (done["full_copies"], done["step"]) == (1, 60)
        assert store.read() == rows_of(service.engine)


def test_tables_of_several_dims_share_a_store(store, capsys):
    with service_of(ps.Engine(config_of(item_dim=7))) as service:
        follow(capsys, service.address.uri, store)
        assert store.read() == rows_of(service.engine)


def test_a_store_of_another_job_is_refused_and_replaced_on_request(store, capsys, refused):
    for number in range(2):
        with service_of(ps.Engine(config_of(), seed=number)) as service:
            if number:
                line = refused(5, "follow", service.address.uri, "--into", store.target, "--once")
                assert "holds the tables of another job or history" in line
                assert "use another target, or --replace" in line
            follow(capsys, service.address.uri, store, *(["--replace"] * number))
            with client_of(service) as client:
                client.put(FRAMES[:9], "w0")
            follow(capsys, service.address.uri, store)
            assert store.read() == rows_of(service.engine)


def test_a_store_of_other_tables_is_refused(store, capsys, refused):
    with service_of(ps.Engine(config_of())) as service:
        follow(capsys, service.address.uri, store)
    with service_of(
        ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(5, 2, name="ad", optimizer=ps.SGD())]))
    ) as service:
        line = refused(5, "follow", service.address.uri, "--into", store.target)
        assert "it holds tables item, user, the service has ad" in line


@pytest.mark.sampled("redis", "lmdb", "delta")
def test_a_follower_survives_a_restart_of_its_service(store, tmp_path):
    config = tmp_path / "tables.pbtxt"
    config_of().save(config)
    address = f"grpc://127.0.0.1:{free_port()}"
    words = (config, "--listen", address, "--checkpoint", tmp_path / "c", "--every", 2, "--resume")
    serving = Process(*words)
    following = started("follow", address, "--into", store.target, "--interval", "0.05")
    with serving, connect(address, patience_s=HANG_S) as client:
        client.put(FRAMES[:10], "w0")
        until(lambda: _step(store) == 10)
        serving.process.kill()
        serving.wait()
        with Process(*words) as again:
            client.put(FRAMES[:20], "w0", first=1)
            until(lambda: _step(store) == 20)
            following.send_signal(signal.SIGINT)
            _, line = following.communicate(timeout=HANG_S)
            assert following.returncode == 130
            assert line.decode().endswith("it has the rows of step 20\n")
            assert again.end(signal.SIGTERM)[0] == 0


def changed_config():
    """Return the tables of ``config_of``, changed: "user" is renamed, "item" has another dim, and "ad" is new."""
    user = ps.TableConfig(KEYS, DIM, name="member", optimizer=ps.Adagrad(0.1), dynamic=DYNAMIC)
    static = [
        ps.TableConfig(ITEMS, dim, name=name, optimizer=ps.Adagrad(0.1)) for name, dim in (("item", 3), ("ad", 2))
    ]
    return ps.EmbeddingConfig.from_tables([*static, user])


def test_a_store_gets_the_tables_again_after_a_change_and_needs_no_flag(store, tmp_path, capsys):
    folder = tmp_path / "c"
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        client.put(FRAMES[:20], "w0")
        follow(capsys, service.address.uri, store)
        before = client.table("item").version
    options = {"rename": {"user": "member"}, "reset_table": "item", "new_tables": True}
    engine = ps.Engine.restore(folder, config=changed_config(), **options)
    store.tables = ("item", "ad", "member")
    with service_of(engine, folder, resume=True) as service, client_of(service) as client:
        with pytest.raises(ps.DeltasGoneError, match="the tables of this service have changed at step 20"):
            list(client.deltas(before))  # the step of the change: no delta lies between
        assert client.status().version.lineage == before.lineage
        done = follow(capsys, service.address.uri, store)
        assert (done["full_copies"], done["step"]) == (1, 20)
        assert store.read() == rows_of(service.engine)
        client.put([batch([1, 2], 1.0, 2, table="ad")], "w1")
        client.put([batch([5], 0.5, 3, table="item")], "w2")
        done = follow(capsys, service.address.uri, store)
        assert (done["full_copies"], done["step"]) == (0, 22)
        assert store.read() == rows_of(service.engine)
    engine = ps.Engine.restore(folder, config=changed_config(), **options)  # the commit has these changes already
    with service_of(engine, folder, resume=True) as service:
        assert follow(capsys, service.address.uri, store)["full_copies"] == 0
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(ITEMS, 2, name="ad", optimizer=ps.Adagrad(0.1))])
    engine = ps.Engine.restore(folder, config=config, drop_table=["item", "member"])
    store.tables = ("ad",)
    with service_of(engine, folder, resume=True) as service:
        assert follow(capsys, service.address.uri, store)["full_copies"] == 1
        assert store.read() == rows_of(service.engine)


def test_a_store_gets_the_rows_of_a_table_that_grows_and_the_keys_of_one_that_becomes_dynamic(store, tmp_path, capsys):
    folder = tmp_path / "c"
    with service_of(ps.Engine(config_of()), folder) as service, client_of(service) as client:
        client.put(FRAMES[:20], "w0")
        follow(capsys, service.address.uri, store)
    user = ps.TableConfig(KEYS, DIM, name="user", optimizer=ps.Adagrad(0.1), dynamic=DYNAMIC)
    for more in ({}, {"dynamic": ps.Dynamic(key_type="uint64")}):
        item = ps.TableConfig(ITEMS + 30, DIM, name="item", optimizer=ps.Adagrad(0.1), **more)
        config = ps.EmbeddingConfig.from_tables([item, user])
        with service_of(ps.Engine.restore(folder, config=config), folder, resume=True) as service:
            assert follow(capsys, service.address.uri, store)["full_copies"] == 1
            assert store.read() == rows_of(service.engine)
        with service_of(ps.Engine.restore(folder, config=config), folder, resume=True) as service:
            assert follow(capsys, service.address.uri, store)["full_copies"] == 0


def _step(store):
    """Return the step of a store; None if it is not written yet."""
    try:
        return store.step()
    except Exception:  # each library raises another type for a store that does not exist
        return None


# Readers may refuse shared files after a kill (test_follow_shared.py).
@pytest.mark.parametrize("kind", [kind for kind in STORES if kind != "shared"])
def test_kills_of_the_follower_leave_the_tables_of_the_step_that_the_store_names(kind, tmp_path, capsys):
    with (
        open_store(kind, tmp_path) as store,
        service_of(ps.Engine(config_of()), per_steps=1) as service,
        client_of(service) as client,
    ):
        follow(capsys, service.address.uri, store)
        states = {0: rows_of(service.engine)}
        for kill in range(3):
            following = started("follow", service.address.uri, "--into", store.target, "--interval", "0.01")
            begin = max(states)
            while (_step(store) or 0) <= begin and max(states) < begin + 15:
                step = max(states) + 1
                client.put(FRAMES[step : step + 1], "w0", first=step)
                states[step] = rows_of(service.engine)
            until(lambda begin=begin: store.step() > begin)
            following.kill()
            following.communicate()
            assert store.read() == states[store.step()], kill
        assert follow(capsys, service.address.uri, store)["full_copies"] == 0
        assert store.read() == rows_of(service.engine)
        assert store.step() == service.engine.global_step


def test_a_follower_waits_for_a_killed_redis_server_and_loses_nothing(tmp_path):
    with open_store("redis", tmp_path) as store, service_of(ps.Engine(config_of()), per_steps=1) as service:
        following = started("follow", service.address.uri, "--into", store.target, "--interval", "0.01", "--json")
        with client_of(service) as client:
            for number in range(1, 41):
                client.put(FRAMES[number : number + 1], "w0", first=number)
                if number % 10 == 0:
                    until(lambda number=number: _step(store) == number)
                    store.kill()
                    store.start()
                    assert store.step() == number
        until(lambda: _step(store) == 40)
        assert store.read() == rows_of(service.engine)
        following.send_signal(signal.SIGTERM)
        out, _ = following.communicate(timeout=HANG_S)
        assert following.returncode == 0
        assert json.loads(out)["step"] == 40


def test_a_full_map_of_lmdb_grows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lmdb_file, "MAP_BYTES", 1 << 15)
    with open_store("lmdb", tmp_path) as store, service_of(ps.Engine(config_of(item_dim=400))) as service:
        follow(capsys, service.address.uri, store)
        assert store.read() == rows_of(service.engine)


# ---- failures


QUIET = ("--log-level", "error")  # the command logs no retries


def test_an_unreachable_service_is_exit_3(tmp_path, refused):
    line = refused(
        3, "follow", f"grpc://127.0.0.1:{free_port()}", "--into", f"parquet:{tmp_path}", "--patience", "0.1", *QUIET
    )
    assert re.match("penstock: grpc://127.0.0.1:[0-9]+: ", line)


def test_a_store_that_is_unreachable_or_full_is_exit_6(tmp_path, refused):
    with service_of(ps.Engine(config_of())) as service:
        store = Redis(tmp_path, "--maxmemory", "1kb")
        words = ("follow", service.address.uri, "--into", store.target, "--patience", "0.1", "--once", *QUIET)
        assert "command not allowed when used memory > 'maxmemory'" in refused(6, *words)
        store.close()
        assert refused(6, *words).startswith(f"penstock: {store.target}: Error 111 connecting to 127.0.0.1")


def test_a_full_disk_under_lmdb_is_exit_6_and_says_so(tmp_path, refused, monkeypatch):
    lmdb = pytest.importorskip("lmdb")

    def truncated(*arguments):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(lmdb_file, "_put", truncated)
    monkeypatch.setattr(lmdb_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with service_of(ps.Engine(config_of())) as service:
        words = ("--into", f"lmdb:{tmp_path}/rows.lmdb", "--patience", "0.1", "--once", *QUIET)
        line = refused(6, "follow", service.address.uri, *words)
    assert line.startswith(f"penstock: lmdb:{tmp_path}/rows.lmdb: [Errno 28] the disk is full, with 4,096 bytes free; ")


def test_wrong_credentials_are_exit_2(tmp_path, refused, monkeypatch):
    with open_store("redis", tmp_path) as store, service_of(ps.Engine(config_of()), tokens=(b"secret",)) as service:
        words = ("follow", service.address.uri, "--into", store.target, "--once", *QUIET)
        monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", "guess")
        assert "set PENSTOCK_FLIGHT_TOKEN to a token of the service" in refused(2, *words)
        monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", "secret")
        store.client.config_set("requirepass", "hidden")
        line = refused(2, *words)
        assert line.endswith("check the user and the password in the URI\n")
        with_password = store.target.replace("//", "//:guess@")
        line = refused(2, "follow", service.address.uri, "--into", with_password, *QUIET)
        assert "guess" not in line


def test_a_store_that_penstock_did_not_write_is_not_overwritten(tmp_path, refused):
    foreign = pa.table({"id": [1, 2]})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    targets = {f"parquet:{tmp_path / 'folder'}": "the folder holds something else; use another one"}
    pytest.importorskip("deltalake").write_deltalake(tmp_path / "delta", foreign)
    targets[f"delta:{tmp_path / 'delta'}"] = "the table was not written by penstock follow; use another one"
    pytest.importorskip("lance").write_dataset(foreign, tmp_path / "lance")
    targets[f"lance:{tmp_path / 'lance'}"] = "the dataset was not written by penstock follow; use another one"
    with pytest.importorskip("lmdb").open(str(tmp_path / "lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    targets[f"lmdb:{tmp_path / 'lmdb'}"] = "the file holds something else; use another path"
    with service_of(ps.Engine(config_of())) as service:
        for target, problem in targets.items():
            line = refused(5, "follow", service.address.uri, "--into", target, "--once", "--replace")
            assert line == f"penstock: {target}: {problem}\n"


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("somewhere", "--into somewhere: expected kafka://BROKER:PORT/TOPIC, lmdb:PATH, redis://HOST:PORT/DATABASE"),
        ("lmdb:", "lmdb:: expected lmdb:PATH"),
        ("json:dumps", "json:dumps: give --state FILE"),
    ],
)
def test_a_misspelled_target_is_exit_2_with_the_forms(target, line, refused):
    assert re.match("penstock: " + line, refused(2, "follow", "grpc://127.0.0.1:1", "--into", target))


def test_a_redis_port_that_is_not_a_number_is_exit_2(refused):
    pytest.importorskip("redis")
    line = refused(2, "follow", "grpc://127.0.0.1:1", "--into", "redis://localhost:port/0")
    assert re.match("penstock: redis://localhost:port/0: expected redis://USER:PASSWORD@HOST:PORT/DATABASE", line)


@pytest.mark.parametrize("change", [{"writerFeatures": ["identityColumns"]}, {"delta.appendOnly": "true"}])
def test_a_delta_table_that_another_writer_made_unwritable_is_an_incompatible_state(change, tmp_path, capsys, refused):
    with open_store("delta", tmp_path) as store, service_of(ps.Engine(config_of())) as service:
        follow(capsys, service.address.uri, store)
        log = Path(store.path, "_delta_log")
        (metadata,) = [
            action["metaData"]
            for action in map(json.loads, (log / f"{0:020d}.json").read_text().splitlines())
            if "metaData" in action
        ]
        protocol = {"minReaderVersion": 1, "minWriterVersion": 7 if "writerFeatures" in change else 2}
        if "writerFeatures" in change:
            action = {"protocol": {**protocol, **change}}
        else:
            action = {"metaData": {**metadata, "configuration": change}}
        commit = {"commitInfo": {"operation": "SET TBLPROPERTIES"}}
        (log / f"{1:020d}.json").write_text("\n".join(map(json.dumps, (commit, action))))
        with client_of(service) as client:
            client.put(FRAMES[:9], "w0")
        line = refused(5, "follow", service.address.uri, "--into", store.target, "--once", "--patience", "0.1")
        assert re.search("deltalake cannot write it any more: .*; another writer changed its features or prop", line)


def test_an_lmdb_file_in_no_folder_is_exit_2(refused, tmp_path):
    pytest.importorskip("lmdb")
    with service_of() as service:
        target = f"lmdb:{tmp_path / 'none' / 'rows.lmdb'}"
        line = refused(2, "follow", service.address.uri, "--into", target, "--once")
    assert line == f"penstock: {target}: there is no folder {tmp_path / 'none'}; create it, or give another path\n"


def test_a_service_that_stops_to_answer_is_noticed(tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    with open_store("parquet", tmp_path) as store, Process(tmp_path / "tables.pbtxt") as serving:
        connection = Connection(serving.address, None, None, 0.1, HANG_S)  # less than an attempt takes
        with Client(connection) as client:
            follower = Follower(client, store.open_target(), 0.0, 0.0)
            while not follower.round():
                pass
            suspend(serving.process)
            connection._timeout_s = 0.2
            with pytest.raises(InputError, match=serving.uri):
                follower.round()
            serving.process.send_signal(signal.SIGCONT)
            connection._timeout_s = HANG_S
            client.put(FRAMES[:3], "w0")
            while not follower.round() or store.step() < 3:
                pass


def test_a_wait_for_a_commit_of_kafka_ends_at_a_signal(tmp_path, monkeypatch):
    def stop():
        if threading.current_thread() is threading.main_thread():  # an earlier test's thread may still retry something
            raise KeyboardInterrupt

    with open_store("kafka", tmp_path) as store, service_of(ps.Engine(config_of())) as service:
        target = store.open_target()
        with client_of(service) as client:
            follower = Follower(client, target, 0.0, 0.0)
            while not follower.round():
                pass
            client.put(FRAMES[:1], "w0")
            commit = target._commit

            def frozen(producer):
                suspend(store.cluster.process)
                monkeypatch.setattr(kafka_topic.interrupts, "check", stop)
                commit(producer)

            monkeypatch.setattr(target, "_commit", frozen)
            with pytest.raises(KeyboardInterrupt):
                until(lambda: follower.round() and store.step() == 1)
        target.close()
        monkeypatch.undo()
        store.cluster.process.send_signal(signal.SIGCONT)
