"""Checkpoints, deltas and tables that commit 0db4065 left are read by today's code.

Every checkpoint resumes with the hash of a run that was never interrupted.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from at_0db4065 import EXPECTED, check_resumed, read_frames, replay_arguments
from deltas import example
from sharing import LocalJob

import penstock as ps


def rows_in(path):
    """id → the values of its columns in a table that ``--out`` wrote."""
    table = pa.parquet.read_table(path)
    columns = [np.array(column.to_pylist(), np.float32) for column in table.columns[1:]]
    return {id_: tuple(column[n].tobytes() for column in columns) for n, id_ in enumerate(table["id"].to_pylist())}


pytestmark = pytest.mark.usefixtures("at_0db4065")


@pytest.mark.parametrize("folder_name", ["static", "dynamic", "cached"])
def test_a_replay_continues_its_commits_its_deltas_and_its_bad_rows(folder_name, call):
    words, form = replay_arguments(folder_name), ("--deltas", f"{folder_name}/deltas.arrows", "--delta-slots", "all")
    begun = len(read_frames(f"{folder_name}/deltas.arrows"))
    flags = ("--on-bad-row", f"quarantine={folder_name}/bad.arrows", *form, "--out", "out")
    tables = check_resumed(call, f"{folder_name}/commits", *words, *flags)["tables"]
    assert 0 < begun < len(read_frames(f"{folder_name}/deltas.arrows"))
    call(0, *words, "--on-bad-row", "drop", "--limit", 0, "--out", "base")
    example.main("base", f"{folder_name}/deltas.arrows", "followed")
    for name, table in tables.items():
        rows, followed = (rows_in(Path(place, f"{name}.parquet")) for place in ("out", "followed"))
        assert rows.items() <= followed.items()
        # Expired keys are in the deltas until they are removed.
        assert len(followed) - len(rows) == table.get("keys", {}).get("expired_waiting", 0)
    bad_rows = sum(batch.num_rows for batch in read_frames(f"{folder_name}/bad.arrows"))
    assert bad_rows == (0 if folder_name == "cached" else 2)


@pytest.mark.parametrize("commits", ["shares", "ray"])
def test_one_process_continues_the_commits_of_a_job(commits, call):
    check_resumed(call, f"job/{commits}", *replay_arguments("job"), "--merge", "round")


@pytest.mark.parametrize("commits", ["shares", "ray"])
@pytest.mark.parametrize("count", [2, 3])
def test_shares_continue_the_commits_of_a_job(commits, count):
    config = ps.EmbeddingConfig.load("job/tables.pbtxt")
    job = LocalJob(config, count, f"job/{commits}")
    assert job.state_hash() == EXPECTED[f"job/{commits}"]["restored"]
    job.run(["job/log.arrows"])
    assert job.state_hash() == EXPECTED[f"job/{commits}"]["resumed"]


@pytest.mark.filterwarnings("default")  # Ray's own warnings
def test_a_job_on_a_cluster_continues_its_commits(call):
    pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)
    saving = ("--checkpoint", "job/ray", "--every", 2, "--resume")
    _, report = call(0, "job", *replay_arguments("job")[1:], *saving, "--ray", "local", "--shares", 2)
    assert (report["skipped"], report["state_hash"]) == (EXPECTED["job/ray"]["skipped"], EXPECTED["job/ray"]["resumed"])


def test_a_replay_in_passes_continues_inside_a_pass(call):
    assert (
        len(list(Path("passes/commits/.passes").glob("*.json"))) == 2
    )  # the flags, and the first pass, which has ended
    saving = ("--checkpoint", "passes/commits", "--every", 1, "--deltas", "passes/deltas.arrows", "--resume")
    _, report = call(0, "passes", *replay_arguments("passes")[1:], "--passes", 3, *saving)
    assert report["state_hash"] == EXPECTED["passes"]["resumed"]
    call(0, *replay_arguments("passes"), "--deltas", "whole.arrows")
    assert read_frames("passes/deltas.arrows") == read_frames("whole.arrows")


@pytest.mark.parametrize("folder_name", ["static", "dynamic", "cached"])
def test_a_replay_begins_at_tables_that_out_wrote(folder_name, call):
    _, report = call(0, *replay_arguments(folder_name), "--on-bad-row", "drop", "--init", f"init/{folder_name}")
    assert report["state_hash"] == EXPECTED[f"init/{folder_name}"]["resumed"]
