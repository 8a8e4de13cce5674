"""What commit 0db4065 left (tests/data/at_0db4065/write.py), and how tests resume from it."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from scripts import loaded

import penstock as ps

DATA = Path(__file__).resolve().parents[1] / "data" / "at_0db4065"
written = loaded("tests/data/at_0db4065/frames.py")
EXPECTED = json.loads((DATA / "expected.json").read_text())
GATE = {"cached": ("--num-required", 2)}


def replaying(folder, *sources):
    """The command of a replay of a folder's sources; without any, of its log."""
    sources = sources or (f"{folder}/log.arrows",)
    return "replay", f"{folder}/tables.pbtxt", *sources, *GATE.get(folder, written.GATE)


def check_restored(commits):
    """The state of a checkpoint, and what its gate holds."""
    engine, wanted = ps.Engine.restore(commits), EXPECTED[commits]
    assert (engine.global_step, engine.gate.num_accumulated) == (wanted["step"], wanted["pending"])
    assert engine.state_hash() == wanted["restored"]
    return engine


def check_resumed(call, commits, *words):
    """A replay continues a checkpoint, commits, and has the hash of a run that was never interrupted."""
    check_restored(commits)
    _, report = call(0, *words, "--checkpoint", commits, "--resume")
    assert (report["skipped"], report["state_hash"]) == (EXPECTED[commits]["skipped"], EXPECTED[commits]["resumed"])
    assert ps.Engine.restore(commits).state_hash() == EXPECTED[commits]["resumed"]
    return report


def rows_in(path):
    """id → the values of its columns in a table that ``--out`` wrote."""
    table = pa.parquet.read_table(path)
    columns = [np.array(column.to_pylist(), np.float32) for column in table.columns[1:]]
    return {id_: tuple(column[n].tobytes() for column in columns) for n, id_ in enumerate(table["id"].to_pylist())}
