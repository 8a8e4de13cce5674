"""Files of format 1, which the code before the first release left in tests/data/format_1, are read and continued."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from cli import outcome
from services import client_of, service_of
from stores import open_store, rows_of

import penstock as ps

DATA = Path(__file__).resolve().parents[1] / "data" / "format_1"
EXPECTED = json.loads((DATA / "expected.json").read_text())


@pytest.fixture(autouse=True)
def copied(tmp_path, monkeypatch):
    """A copy as the working directory: commits name their sources as they were spelled."""
    shutil.copytree(DATA, tmp_path / "data", symlinks=True)
    monkeypatch.chdir(tmp_path / "data")


def batches(path):
    with pa.ipc.open_stream(Path(path).read_bytes()) as reader:
        return [batch for batch in reader if batch.num_rows]


def restored(commits):
    engine, expected = ps.Engine.restore(commits), EXPECTED[commits.partition("@")[0]]
    assert (engine.global_step, engine.gate.num_accumulated) == (expected["step"], expected["pending"])
    assert engine.state_hash() == expected["hash"]
    return engine


def test_a_replay_continues_its_commits_its_deltas_and_its_bad_rows(call):
    assert restored("replay").gate.num_accumulated
    restored("replay@half")
    deltas, bad = len(batches("replay.deltas.arrows")), len(batches("replay.bad.arrows"))
    files = ("--deltas", "replay.deltas.arrows", "--on-bad-row", "quarantine=replay.bad.arrows")
    words = ("replay", "tables.pbtxt", "log.arrows", "--num-required", 3, *files, "--checkpoint", "replay", "--resume")
    _, report = call(0, *words)
    assert report["state_hash"] == EXPECTED["replay"]["resumed"]
    assert ps.Engine.restore("replay").state_hash() == EXPECTED["replay"]["resumed"]
    assert len(batches("replay.deltas.arrows")) > deltas > 0
    assert len(batches("replay.bad.arrows")) >= bad > 0


def test_a_service_continues_its_producer_and_a_target_its_rows(capsys):
    frames = batches("log.arrows")
    with service_of(restored("service"), "service", every=4, resume=True, on_bad_row="drop") as service:
        with client_of(service) as client:
            assert client.position("worker") == EXPECTED["service"]["step"]
            client.put(frames, "worker", first=1)
        code, done, text = outcome(capsys, "follow", service.address.uri, "--into", "parquet:rows", "--once")
        assert (code, done["full_copies"], done["deltas"] > 0) == (0, 0, True), text
        with open_store("parquet", Path()) as store:
            assert (store.step(), store.read()) == (len(frames), rows_of(service.engine))


def test_a_target_of_an_unreleased_version_is_refused(refused):
    state = Path("rows/current/penstock.json")
    state.write_text(state.read_text().replace('"penstock.target": 1', '"format": 2'))
    with service_of(restored("service"), "service", every=4, resume=True) as service:
        error = refused(5, "follow", service.address.uri, "--into", "parquet:rows", "--once")
    assert (
        "written by an unreleased earlier version of penstock, which is not read; follow into another target" in error
    )
