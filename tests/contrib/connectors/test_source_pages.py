"""Each section of docs/sources.md: its lines send frames, and its commands apply them."""

import signal

import pytest
from brokers import MockKafka, Nats
from limits import until
from scripts import block
from services import Process, config_of, connect, frame, replayed

import penstock as ps
from penstock.cli import main

BATCHES = [frame(number, step=number) for number in range(3)]


HEADINGS = {"nats": "NATS JetStream", "kafka": "Kafka", "delta": "Delta Lake", "lance": "Lance", "iceberg": "Iceberg"}


def commands(kind):
    lines = block("sources", "console", HEADINGS[kind]).splitlines()
    return [line.removeprefix("$ penstock ").split() for line in lines]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the page's relative paths."""
    monkeypatch.chdir(tmp_path)
    config_of().save(tmp_path / "tables.pbtxt")


def check_state():
    assert ps.Engine.restore("state").state_hash() == replayed(BATCHES).state_hash()


@pytest.mark.parametrize("kind", ["nats", "kafka"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_broker(kind, number, tmp_path):
    with MockKafka() if kind == "kafka" else Nats(tmp_path / "nats") as broker:
        used, position = ("127.0.0.1:9092", "127.0.0.1:4222")[kind == "nats"], broker.address
        names = {"batches": BATCHES}
        exec(block("sources", "py", "Topics"), names)
        exec(block("sources", "py", HEADINGS[kind]).replace(used, position), names)
        command, *words = (word.replace(used, position) for word in commands(kind)[number])
        producer = "kafka/gradients/0" if kind == "kafka" else "nats/gradients"
        if command == "serve":
            with Process(*words) as running, connect(running.uri) as client:
                until(lambda: client.position(producer) == len(BATCHES))
                assert running.end(signal.SIGTERM)[0] == 0
        else:
            assert main([command, *words]) == 0
    check_state()


@pytest.mark.parametrize("kind", ["delta", "lance", "iceberg"])
def test_a_table(kind, tmp_path, monkeypatch):
    pytest.importorskip({"delta": "deltalake", "iceberg": "pyiceberg"}.get(kind, kind))
    if kind == "iceberg":
        pytest.importorskip("sqlalchemy")
        import pyiceberg.catalog
        from pyiceberg.utils.config import Config

        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}")
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # read at the first import
    exec(block("sources", "py", HEADINGS[kind]), {"batches": BATCHES})
    (command,) = commands(kind)
    assert main(command) == 0
    check_state()
