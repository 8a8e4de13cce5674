"""Each section of docs/targets.md: its command follows a service, and its lines read the rows of the store."""

import sys

import numpy as np
import pytest
from scripts import block
from services import client_of, service_of
from stores import STORES, config_of, frame, open_store

import penstock as ps
from penstock.cli import main

HEADINGS = {"redis": "Redis", "kafka": "Kafka", "lmdb": "LMDB", "lance": "Lance", "delta": "Delta Lake"}
HEADINGS |= {"parquet": "Parquet", "shared": "Shared files", "function": "A Python function"}


def section(kind, language):
    return block("targets", language, HEADINGS[kind])


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A service with rows of the keys 7 and 12, and the folder of the page's relative paths."""
    monkeypatch.chdir(tmp_path)
    with service_of(ps.Engine(config_of(key_type="int64"))) as running, client_of(running) as client:
        client.put([frame(0, keys=[7, 7, 12, 12])], "w0")
        yield running


def run_command(kind, service, target=None, *flags):
    words = section(kind, "console").removeprefix("$ penstock ").split()
    words[1] = service.address.uri
    if target is not None:
        words[3] = target
    assert main([*words, "--once", *flags]) == 0


def expected(service, key=7):
    return service.engine.lookup("user", [key])[0]


def test_redis(service, tmp_path):
    with open_store("redis", tmp_path) as store:
        run_command("redis", service, store.target)
        names = {}
        exec(section("redis", "py").replace("6379", str(store.port)), names)
        names["store"].close()
    assert np.array_equal(names["row"], expected(service))
    assert np.array_equal(names["rows"], [expected(service, 7), expected(service, 12)])
    assert names["step"] == 1


def test_kafka(service, tmp_path):
    with open_store("kafka", tmp_path) as store:
        run_command("kafka", service, store.target)
        names = {}
        exec(section("kafka", "py").replace("127.0.0.1:9092", store.cluster.brokers), names)
    assert np.array_equal(names["row"], expected(service))
    assert len(names["rows"]) == 30 + 2


@pytest.mark.parametrize("kind", [kind for kind in STORES if kind not in ("redis", "kafka")])
def test_a_store_of_files(kind, service, tmp_path):
    STORES[kind](tmp_path)  # skips without the library
    run_command(kind, service)
    names = {}
    exec(section(kind, "py"), names)
    if kind in ("lmdb", "shared"):
        assert np.array_equal(names["row"], expected(service))
    else:
        actual = names["rows" if kind == "lance" else "users"].to_pylist()
        rows = {row["id"]: np.array(row["row"], np.float32) for row in actual}
        assert rows.keys() == {7, 12}
        assert np.array_equal(rows[7], expected(service))


def test_a_function(service, tmp_path, monkeypatch, capsys):
    (tmp_path / "cache.py").write_text(section("function", "py"))
    monkeypatch.delitem(sys.modules, "cache", raising=False)
    run_command("function", service)
    rows = sys.modules["cache"].rows
    assert len(rows) == 30 + 2
    assert np.array_equal(rows["user", 7], expected(service))
    with client_of(service) as client:
        client.put([frame(step, keys=[7, 30 + step, 30 + step]) for step in range(1, 80)], "w0")
    run_command("function", service)
    assert ("user", 12) not in rows  # evicted
    assert np.array_equal(rows["user", 7], expected(service))
    assert (tmp_path / "cache.json").exists()
    monkeypatch.setattr(sys.modules["cache"], "update", lambda *_: 1 / 0)
    with client_of(service) as client:
        client.put([frame(0, keys=[7])], "w0")
    words = ["follow", service.address.uri, "--into", "cache:update", "--state", str(tmp_path / "cache.json")]
    capsys.readouterr()
    assert main([*words, "--patience", "0.1", "--log-level", "error"]) == 6
    assert capsys.readouterr().err == (
        "penstock: cache:update: step 81: ZeroDivisionError: division by zero; retried for 0.1 s (patience)\n"
    )
