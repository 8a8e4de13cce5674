"""The data that commit 0db4065 left on disk, in stores and in topics, and functions to resume from it.

``git show 405126c:tests/data/at_0db4065/write.py`` prints the script that wrote the data with the code of that commit.
Never rewrite the data: later versions must read what that version wrote. A format that is added later gets a new
folder.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

import penstock as ps

DATA = Path(__file__).resolve().parents[1] / "data" / "at_0db4065"
EXPECTED = json.loads((DATA / "expected.json").read_text())
NUM_FRAMES = 24  # in each log
GATE_FLAGS = ("--num-required", 3)
GATE_FLAGS_OF_FOLDER = {"cached": ("--num-required", 2)}


def replay_arguments(folder, *sources):
    """Return the arguments that replay the sources with the folder's tables; without sources, the folder's log."""
    sources = sources or (f"{folder}/log.arrows",)
    return "replay", f"{folder}/tables.pbtxt", *sources, *GATE_FLAGS_OF_FOLDER.get(folder, GATE_FLAGS)


def check_restored(commits):
    """Assert that a restored checkpoint has the expected step, pending contributions and hash. Return its engine."""
    engine, expected = ps.Engine.restore(commits), EXPECTED[commits]
    assert (engine.global_step, engine.gate.num_accumulated) == (expected["step"], expected["pending"])
    assert engine.state_hash() == expected["restored"]
    return engine


def check_resumed(call, commits, *arguments):
    """Assert that a replay resumes a checkpoint to the hash of an uninterrupted run, and commits. Return its report."""
    check_restored(commits)
    _, report = call(0, *arguments, "--checkpoint", commits, "--resume")
    assert (report["skipped"], report["state_hash"]) == (EXPECTED[commits]["skipped"], EXPECTED[commits]["resumed"])
    assert ps.Engine.restore(commits).state_hash() == EXPECTED[commits]["resumed"]
    return report


def read_frames(path):
    with pa.ipc.open_stream(Path(path).read_bytes()) as reader:
        return list(reader)
