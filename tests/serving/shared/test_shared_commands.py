"""``--shared`` of replay and serve: readers see the run's rows, and impossible combinations are one-line errors."""

import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli import TWO_TABLES, frame
from ipc import write
from limits import in_thread
from services import Process, free_port

import penstock as ps
from penstock.cli import main
from penstock.rows.shared.header import HeaderHistory
from penstock.serving.flight import connect


@pytest.fixture
def job(tmp_path):
    """A configuration of two tables, and a log of ten steps of the first one."""
    (tmp_path / "tables.pbtxt").write_text(TWO_TABLES)
    log = write(tmp_path / "log.arrows", [frame(step, table=["user"] * 4) for step in range(10)])
    return tmp_path / "tables.pbtxt", log


def test_a_replay_shares_the_rows_that_it_writes(job, tmp_path, capsys):
    reader = None
    for number in range(2):
        flags = ["--shared", tmp_path / "shared", "--out", tmp_path / f"out{number}"]
        assert main(["replay", *map(str, [*job, *flags])]) == 0
        reader = reader or ps.Reader(tmp_path / "shared")
        out = pq.read_table(tmp_path / f"out{number}" / "user.parquet")
        assert reader.lookup("user", range(50), consistent=True).tolist() == out["row"].to_pylist()
        assert (reader.tables, reader.version.step, reader.durable_step) == (("user", "item"), 10, 0)


def test_a_replay_shares_its_initial_tables(job, tmp_path, capsys):
    config, log = map(str, job)
    start, shared = str(tmp_path / "start"), str(tmp_path / "shared")
    assert main(["replay", config, log, "--out", start]) == 0
    assert main(["replay", config, log, "--init", start, "--limit", "0", "--shared", shared]) == 0
    rows = pq.read_table(tmp_path / "start" / "user.parquet")["row"].to_pylist()
    assert ps.Reader(shared).lookup("user", range(50)).tolist() == rows


def test_a_resumed_replay_shares_the_commit(job, tmp_path, capsys):
    words = ["replay", *map(str, job), "--checkpoint", str(tmp_path / "state"), "--shared", str(tmp_path / "shared")]
    assert main([*words, "--limit", "4"]) == 0
    reader = ps.Reader(tmp_path / "shared")
    assert (reader.version.step, reader.durable_step) == (4, 4)
    assert main([*words, "--resume"]) == 0
    assert (reader.version.step, reader.durable_step) == (10, 10)


def test_a_services_rows_are_read_while_it_runs_and_after_it(job, tmp_path):
    config, _ = job
    with Process(config, "--shared", tmp_path / "shared") as service:
        reader = ps.Reader(tmp_path / "shared")
        with connect(service.uri) as client:
            client.put([frame(step, table=["user"] * 4) for step in range(3)], "worker")
            assert reader.version.step == 3
            answer = client.lookup({"user": [1, 2, 3]})
            wanted = answer["user"]
            assert reader.version == answer.version
            assert np.array_equal(reader.lookup("user", [1, 2, 3]), wanted)
            client.drain()
        assert service.wait()[0] == 0
    assert np.array_equal(reader.lookup("user", [1, 2, 3], consistent=True), wanted)


NO_JAX = """
import sys
from penstock.cli.main import main
code = main(sys.argv[1:])
import penstock as ps
ps.Reader(sys.argv[-1]).lookup("user", [1])
print(code, [name for name in ("jax", "jaxlib") if name in sys.modules], file=sys.stderr)
"""


def test_neither_sharing_nor_reading_loads_jax(job, tmp_path):
    words = ["replay", *map(str, job), "--shared", str(tmp_path / "shared")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", NO_JAX, *words], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr.splitlines()[-1] == "0 []"


def test_a_start_publishes_only_the_epoch_of_its_service(job, tmp_path, monkeypatch):
    config, _ = job
    written, write = [], HeaderHistory.write
    monkeypatch.setattr(HeaderHistory, "write", lambda words, version: written.append(version) or write(words, version))
    for _ in range(2):
        uri = f"grpc://127.0.0.1:{free_port()}"
        words = ["serve", config, "--listen", uri, "--checkpoint", tmp_path / "state", "--resume"]
        words += ["--shared", tmp_path / "shared"]
        serving = in_thread(lambda words=words: main([*map(str, words)]))
        with connect(uri) as client:
            status = client.status()
            client.drain()
        assert serving() == 0
        assert {version.epoch for version in written} == {status["epochs"][-1][0]}
        written.clear()
