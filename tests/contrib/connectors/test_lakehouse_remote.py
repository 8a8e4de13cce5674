"""Replays of tables with versions that a server has: it is gone for a while, for good, or refuses the caller."""

import json
import socket
import threading

import pyarrow as pa
import pytest
from s3_server import KEY, REGION, SECRET
from services import config_of, frame, replayed

import penstock as ps
from penstock.base.errors import InputError, TargetError
from penstock.contrib.connectors import table_versions
from penstock.serving.followers.target_kinds import open_target

FRAMES = [frame(number, rows=5, step=number) for number in range(6)]


class Server:
    """A server that speaks S3, with one bucket. Objects stay while it is stopped."""

    def __init__(self, port=0):
        moto = pytest.importorskip("moto.server", reason="moto is not installed", exc_type=ImportError)
        self._start = lambda port: moto.ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self.port = 0
        self.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self._server = self._start(self.port)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self):
        self._server.stop()


@pytest.fixture
def server(monkeypatch):
    running = Server()
    endpoint = running.endpoint
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    pa.fs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True).create_dir("tables")
    yield running
    running.stop()


def append(scheme, uri, numbers):
    for number in numbers:
        rows = pa.Table.from_batches([FRAMES[number]])
        if scheme == "delta":
            pytest.importorskip("deltalake").write_deltalake(uri, rows, mode="append")
        else:
            pytest.importorskip("lance").write_dataset(rows, uri, mode="append" if number else "create")


@pytest.mark.parametrize("scheme", ["delta", "lance"])
def test_a_server_that_is_gone_for_a_while_is_retried(scheme, server, tmp_path):
    uri = f"s3://tables/{scheme}"
    append(scheme, uri, range(4))
    engine = ps.Engine(config_of())
    engine.run(f"{scheme}:{uri}", limit=2, checkpoint=tmp_path / "c")
    server.stop()
    back = threading.Timer(1.0, server.start)
    back.start()
    engine.run(f"{scheme}:{uri}", checkpoint=tmp_path / "c", resume=True)
    back.join()
    assert engine.state_hash() == replayed(FRAMES[:4]).state_hash()


@pytest.mark.parametrize("scheme", ["delta", "lance"])
def test_a_server_that_stays_away_is_bad_input(scheme, server):
    uri = f"s3://tables/{scheme}-gone"
    append(scheme, uri, range(2))
    server.stop()
    with pytest.raises(InputError, match=f"{scheme}:s3://tables/{scheme}-gone: the table cannot be read: "):
        ps.Engine(config_of()).run(f"{scheme}:{uri}", patience=0.1)
    server.start()


def test_a_file_that_is_damaged_is_not_read_forever(server):
    uri = "s3://tables/damaged"
    append("delta", uri, range(2))
    fs = pa.fs.S3FileSystem(endpoint_override=server.endpoint)
    (path,) = pytest.importorskip("deltalake").DeltaTable(uri, version=0).file_uris()
    path = path.removeprefix("s3://")
    data = bytearray(fs.open_input_stream(path).read())
    data[4:60] = bytes(56)  # the first page; the footer stays
    with fs.open_output_stream(path) as file:
        file.write(data)
    with pytest.raises(InputError, match=r"version 0, .*"):
        ps.Engine(config_of()).run(f"delta:{uri}", patience=0.1)


@pytest.mark.parametrize("scheme", ["delta", "lance"])
def test_a_table_that_does_not_exist_is_not_waited_for(scheme, server):
    append(scheme, f"s3://tables/{scheme}-other", [0])
    with pytest.raises(InputError, match="none: the table cannot be read: "):
        ps.Engine(config_of()).run(f"{scheme}:s3://tables/none", patience=3600.0)


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_clone_names_the_files_of_another_bucket(server, scheme):
    table_of = pytest.importorskip("deltalake").DeltaTable
    fs = pa.fs.S3FileSystem(endpoint_override=server.endpoint, allow_bucket_creation=True)
    fs.create_dir(f"{scheme}-other")
    append("delta", f"s3://tables/{scheme}-rows", range(2))
    append("delta", f"s3://tables/{scheme}-clone", [0])
    first, last = (set(table_of(f"s3://tables/{scheme}-rows", version=version).file_uris()) for version in range(2))
    (path,) = last - first
    copy = f"{scheme}-other/copied rows/1"
    pa.fs.copy_files(path.removeprefix("s3://"), copy, source_filesystem=fs, destination_filesystem=fs)
    add = {"path": f"{scheme}://{copy}".replace(" ", "%20"), "size": 1, "modificationTime": 0, "partitionValues": {}}
    with fs.open_output_stream(f"tables/{scheme}-clone/_delta_log/{1:020d}.json") as file:
        file.write(json.dumps({"add": {**add, "dataChange": True}}).encode())
    engine = ps.Engine(config_of())
    engine.run(f"delta:s3://tables/{scheme}-clone")
    assert engine.state_hash() == replayed(FRAMES[:2]).state_hash()


def test_a_store_that_stops_to_answer_is_noticed(monkeypatch):
    pytest.importorskip("deltalake")
    monkeypatch.setitem(table_versions.STORE_OPTIONS, "timeout", "1s")
    monkeypatch.setitem(table_versions.STORE_OPTIONS, "retry_timeout", "500ms")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        target = open_target("delta:s3://tables/rows")
        with pytest.raises(TargetError, match="operation timed out"), target.failures():
            target.stored()
