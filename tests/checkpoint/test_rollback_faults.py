"""Rollbacks that meet damage, a full disk, readers and kills; and rollbacks of jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evidence import IS_EVIDENCE, IS_LONG, more_as_evidence
from faults.operations import full_disk
from limits import in_thread, until
from rollbacks import CONFIGS, bits, push, rows_of_frame, trained
from sharing import LocalJob

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.rollbacks import roll_back_folder
from penstock.checkpoint.store import Folder

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


# ---- faults


def test_a_failure_half_way_fails_the_engine_and_not_its_commits(folder, monkeypatch):
    engine = trained("plain", folder)
    state = ps.Engine.restore(folder).state_hash()

    def fail(*_):
        raise OSError("no such device")

    monkeypatch.setattr(engine.core.tables, "set_stored_rows", fail)
    with pytest.raises(OSError, match="no such device"):
        engine.rollback("good")
    with pytest.raises(ps.StateError, match="an earlier step failed half way"):
        engine.apply(rows_of_frame(engine.config, 1))
    assert ps.Engine.restore(folder).state_hash() == state


@pytest.mark.parametrize("num_writes", range(2))
def test_a_full_disk_leaves_the_folder_as_it_was(num_writes, folder, monkeypatch):
    engine = trained("lru", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", full_disk(num_writes))
        with pytest.raises(OSError, match="No space left"):
            roll_back_folder(folder, "good")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    engine.rollback("good")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", full_disk(num_writes))
        with pytest.raises(OSError, match="No space left"):
            engine.save(folder)
    assert ps.Engine.restore(folder).global_step == 10
    engine.save(folder)  # its next commit is whole
    assert ps.Engine.restore(folder).state_hash() == engine.state_hash()


def test_missing_files_of_the_version_are_written_again(folder):
    engine = trained("plain", folder)
    engine.rollback("good")
    last = Folder(folder).tag("good").commit.files[-1].name
    (folder / "good.tag").unlink()
    (folder / last).unlink()
    engine.save(folder)
    assert ps.Engine.restore(folder).state_hash() == engine.state_hash()


# ---- shares


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["plain", "mod", "lru"])
def test_a_job_of_shares_is_rolled_back_in_its_folder(kind, before, after, folder, tmp_path):
    config = CONFIGS[kind]
    job = LocalJob(config, before, num_required=2)
    alone = ps.Engine(config, num_required=2)
    for first in range(0, 12, 4):
        for engine in [*job.engines, alone]:
            push(engine, range(first, first + 4))
        job.commit(folder)
        alone.save(tmp_path / "alone")
        if first == 4:
            ps.tag(folder, "good")
            ps.tag(tmp_path / "alone", "good")
    with pytest.raises(ps.StateError, match="holds a share of the rows; use penstock rollback DIR"):
        job.engines[0].rollback("good")
    for path in (folder, tmp_path / "alone"):
        assert roll_back_folder(path, "good").step == 7
    rolled, alone = LocalJob(config, after, folder), ps.Engine.restore(tmp_path / "alone")
    assert rolled.state_hash() == alone.state_hash()
    for engine in [*rolled.engines, alone]:
        push(engine, range(30, 40))
    assert rolled.state_hash() == alone.state_hash()
    rolled.commit(folder, attempt="b1")
    assert ps.Engine.restore(folder).state_hash() == alone.state_hash()
    whole = ps.Engine.restore(folder)
    assert whole.rollback("good") == 13
    whole.save(folder)
    assert bits(whole) == bits(ps.Engine.restore(folder)) == bits(ps.Engine.restore(folder, version="good"))


# ---- readers


@pytest.mark.parametrize("shared", [False, True])
def test_readers_without_the_lock_see_all_of_a_rollback_or_nothing(shared, folder, tmp_path):
    engine = trained("lru", folder, shared=tmp_path / "shared" if shared else None)
    reader = ps.Reader(tmp_path / "shared") if shared else engine.reads
    keys = ps.Engine.restore(folder, version="good").keys("user")
    good = ps.Engine.restore(folder, version="good")
    wanted = {name: good.lookup(name, ids).tobytes() for name, ids in (("user", keys), ("item", range(40)))}
    ids = {"user": keys, "item": np.arange(40)}
    steps, ended = [], []

    def read():
        while not ended:
            rows = reader.lookup(ids, consistent=True, timeout_ms=60_000)
            step = rows.version.step
            same = {name: rows[name].tobytes() for name in rows} == wanted
            assert same == (step == 13), step
            steps.append(step)
        return steps

    lost = np.setdiff1d(engine.keys("user"), keys)
    assert len(lost) > 5
    done = in_thread(read)
    until(lambda: steps)
    engine.rollback("good")
    absent = reader.lookup({"user": lost}, consistent=True, timeout_ms=60_000)
    assert absent["user"].tobytes() == good.lookup("user", lost).tobytes()
    seen = len(steps)
    until(lambda: len(steps) > seen + 2)
    ended.append(True)
    done()
    assert {steps[0], steps[-1]} == {12, 13}
    push(engine, range(30, 40))
    push(good, range(30, 40))
    rows = reader.lookup({"user": good.keys("user")}, consistent=True, timeout_ms=60_000)
    assert rows["user"].tobytes() == good.lookup("user", good.keys("user")).tobytes()
    gone = np.setdiff1d(keys, good.keys("user"))
    absent = reader.lookup({"user": gone}, consistent=True, timeout_ms=60_000)
    assert absent["user"].tobytes() == good.lookup("user", gone).tobytes()


# ---- kills


@pytest.mark.evidence
@more_as_evidence
@pytest.mark.parametrize("kind", ["folder", "engine", "service", "job"])
def test_a_rollback_that_is_killed_has_happened_or_not(kind, tmp_path):
    """In a process whose children are killed; a failure names the number that repeats it."""
    count = 250 if IS_LONG else 16 if IS_EVIDENCE else 3
    command = [sys.executable, "-m", "faults.rollbacks", kind, "0", str(count), str(tmp_path)]
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert sum(counts.values()) == count
    assert any(name.startswith("killed") for name in counts)
