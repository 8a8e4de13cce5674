"""A quarantine next to a checkpoint: whatever ends a run, a resumed one neither loses nor repeats a bad row."""

import errno
import os
import threading

import pytest
from batches import batch
from cli import outcome, table
from faults.operations import Watched, full_disk
from ipc import write
from limits import HANG_S
from quarantines import rows_of

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.source_positions import Positions

CONFIG = table(rate="constant: 0.5") + "mode: TRAINING\n"
NUM_FRAMES = 12


def frame(step, bad_id, values):
    """Three rows, the second bad."""
    return batch([step, bad_id, 3], values, step=step)


@pytest.fixture
def files(config, tmp_path):
    """The configuration and a log of which every frame has a bad row, numbered by its id."""
    batches = [frame(step, 1000 + step, [[1.0, float(step)]] * 3) for step in range(NUM_FRAMES)]
    return str(config), write(tmp_path / "log.arrows", batches)


@pytest.fixture
def replay(files, tmp_path, capsys):
    line = ["replay", *files, "--checkpoint", tmp_path / "saved", "--every", 2]
    return lambda *words: outcome(capsys, *line, *words)[:2]


def ids_in(path):
    return [row["id"] for row in rows_of(path)]


def test_a_resumed_run_with_another_quarantine_names_the_problem_or_begins_it(replay, refused, files, tmp_path):
    first, other = (f"quarantine={tmp_path / name}.arrows" for name in ("first", "other"))
    assert replay("--limit", "0", "--on-bad-row", first)[0] == 0
    assert replay("--limit", "3", "--resume", "--on-bad-row", other)[0] == 0  # the first one has no rows to continue
    assert ids_in(tmp_path / "other.arrows") == EVERY[:3]
    words = ("replay", *files, "--checkpoint", tmp_path / "saved", "--resume", "--on-bad-row")
    line = refused(5, *words, f"quarantine={tmp_path / 'third.arrows'}")
    assert "third.arrows: the quarantine of the checkpoint cannot be read: there is no such file; it has 3 rows" in line
    assert replay("--resume", "--on-bad-row", other)[0] == 0
    assert ids_in(tmp_path / "other.arrows") == EVERY


EVERY = [1000 + step for step in range(NUM_FRAMES)]


@pytest.mark.parametrize("name", ["bad.arrows", "bad.arrow"])
@pytest.mark.parametrize("limit", [0, 1, 5, 12])
def test_a_resumed_run_quarantines_the_rows_of_an_unbroken_one(name, limit, replay, tmp_path):
    file = tmp_path / name
    code, _ = replay("--limit", str(limit), "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY[:limit])
    code, report = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY)
    assert report["dropped"] == ({"id_out_of_range": NUM_FRAMES - limit} if limit < NUM_FRAMES else {})
    # Nothing is reported again of skipped frames.
    assert [f"got {1000 + limit} [" in note for note in report["notes"]] == [True] * (limit < NUM_FRAMES)


@pytest.mark.parametrize("limit", [1, 5, 12])
@pytest.mark.parametrize("devices", ["1", "3"])
def test_bad_values_found_while_summing_are_quarantined_once(limit, devices, files, replay, tmp_path, call):
    """Ids and values are looked at while they are summed; skipped frames are checked all the same."""
    values = [[1.0, 2.0], [float("nan"), 1.0], [3.0, 4.0]]
    write(files[1], [frame(step, 20 + step, values) for step in range(NUM_FRAMES)])
    unbroken = call(0, "replay", *files, "--on-bad-row", "drop")[1]["state_hash"]
    words = ["--on-bad-row", f"quarantine={tmp_path / 'bad.arrows'}"]
    replay("--limit", str(limit), *words)
    code, report = replay("--resume", "--devices", devices, *words)
    assert (code, ids_in(tmp_path / "bad.arrows")) == (0, [20 + step for step in range(NUM_FRAMES)])
    left = NUM_FRAMES - limit
    assert (report["state_hash"], report["dropped"]) == (unbroken, {"gradient_not_finite": left} if left else {})
    assert [f"batch {limit}, row 1" in note for note in report["notes"]] == [True] * bool(left)


def test_a_quarantine_that_cannot_be_written_stops_commits(replay, tmp_path, monkeypatch):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", full_disk(with_bytes=b"id_out_of_range"))
        code, output = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, "space" in output["error"]) == (6, True)
    code, _ = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY)


def test_after_a_frame_that_no_position_counts_nothing_is_saved_or_resumed(files, tmp_path, monkeypatch):
    engine = ps.Engine(ps.EmbeddingConfig.load(files[0]))
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "BUFFER_BYTES", 16)
        patch.setattr(atomic_files, "operations", full_disk(with_bytes=b"id_out_of_range"))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            engine.run(files[1], on_bad_row=f"quarantine={tmp_path / 'bad.arrows'}")
    assert engine.global_step == 1
    uncounted = r"the last frame was applied, but not counted \(OSError: .*restore the last commit"
    with pytest.raises(ps.StateError, match=uncounted):
        engine.save(tmp_path / "saved")
    with pytest.raises(ps.StateError, match=uncounted):
        engine.run(files[1], resume=True, on_bad_row="drop")
    engine.run(files[1], on_bad_row="drop")  # a new source, from its start
    engine.save(tmp_path / "saved")
    assert ps.Engine.restore(tmp_path / "saved").state_hash() == engine.state_hash()


def test_an_interrupt_of_a_run_is_not_raised_by_a_save_of_another_thread(files, tmp_path, monkeypatch):
    engine = ps.Engine(ps.EmbeddingConfig.load(files[0]))

    def interrupted(*_):
        raise KeyboardInterrupt

    reader = engine.stage(files[1], on_bad_row="drop")
    with monkeypatch.context() as patch:
        patch.setattr(Positions, "count", interrupted)
        reader.read_next_batch()
    with pytest.raises(ps.StateError, match=r"applied, but not counted \(KeyboardInterrupt\)"):
        engine.save(tmp_path / "saved")
    with pytest.raises(KeyboardInterrupt):
        reader.read_next_batch()


def test_a_run_that_ends_during_a_save_closes_its_files_after_it(files, tmp_path, monkeypatch):
    engine = ps.Engine(ps.EmbeddingConfig.load(files[0]))
    syncing, ended, outcomes = threading.Event(), threading.Event(), []

    def at(number, name, args):
        part = tmp_path / ".bad.arrows.part"
        if name == "sync" and not syncing.is_set() and os.fstat(args[0]).st_ino == part.stat().st_ino:
            syncing.set()
            ended.wait(0.5)  # the run waits too: it may not close the file now

    def save():
        try:
            outcomes.append(engine.save(tmp_path / "saved"))
        except BaseException as error:
            outcomes.append(error)

    saving = threading.Thread(target=save)

    def frames():
        yield frame(0, 1000, [[1.0, 0.0]] * 3).drop_columns(["step"])
        saving.start()
        assert syncing.wait(HANG_S)

    monkeypatch.setattr(atomic_files, "operations", Watched(at))
    engine.run(frames(), on_bad_row=f"quarantine={tmp_path / 'bad.arrows'}")
    ended.set()
    saving.join(HANG_S)
    assert outcomes == [None]
    assert ids_in(tmp_path / "bad.arrows") == [1000]


def test_a_missing_quarantine_is_exit_5_and_nothing_is_applied(replay, tmp_path):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")
    file.unlink()
    code, output = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, "the quarantine of the checkpoint cannot be read" in output["error"]) == (5, True)
    assert not file.exists()
    assert replay("--resume")[0] == 3  # without a quarantine the bad row is an error again


def test_a_run_without_quarantine_in_between_keeps_the_place(replay, tmp_path):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")
    replay("--limit", "6", "--resume", "--on-bad-row", "drop")
    replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert ids_in(file) == EVERY[:4] + EVERY[6:]
