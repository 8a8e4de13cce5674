"""Runs with a checkpoint: resumed anywhere, they end as an unbroken one; whose folder it is."""

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import LOG, ROWS, batch, commits, engine_of, everything, log_of, unbroken
from device_table import addresses_of
from ipc import write
from limits import in_thread

import penstock as ps
from penstock.base.errors import InputError, StateError, UsageError
from penstock.base.filesystem.file_stores import LocalStore
from penstock.checkpoint.incremental import Saver

# ---- runs that are resumed


@pytest.mark.sampled("1-1", "1-5", "7-2", "20-1", "20-5", "36-2")
@pytest.mark.parametrize("every", [1, 2, 5, None])
@pytest.mark.parametrize("stop", [1, 7, 20, 36])
@pytest.mark.promise("A run that was killed resumes to the bits of one that was not")
def test_a_run_resumed_anywhere_ends_as_an_unbroken_one(tmp_path, every, stop, small_blocks):
    log, folder = write(tmp_path / "log.arrows", LOG), tmp_path / "c"
    engine_of().run(log, limit=stop, checkpoint=folder, every=every)
    engine = ps.Engine.restore(folder)
    report = engine.run(log, checkpoint=folder, every=every, resume=True, flush=True)
    assert (report.skipped, report.frames) == (stop, len(LOG) - stop)
    assert engine.state_hash() == unbroken()
    again = ps.Engine.restore(folder)
    assert again.run(log, checkpoint=folder, resume=True).skipped == len(LOG)
    assert again.state_hash() == unbroken()


def test_every_commit_is_the_state_of_its_step_however_many_steps_go_by_meanwhile(tmp_path, small_blocks):
    engine, states = engine_of(num_required=1), {}
    folder = tmp_path / "c"

    def remember(counters, gate, share):
        if gate.global_step not in states:
            states[gate.global_step] = everything(engine)[:2]

    engine.run(iter(LOG), checkpoint=folder, every=3, keep=100, progress=remember)
    names = [name for name in commits(folder) if name.endswith("commit")]
    assert len(names) > 1
    while names:
        other = ps.Engine.restore(folder)
        assert everything(other)[:2] == states[other.global_step]
        (folder / names.pop()).unlink()


def test_the_tables_are_updated_in_place_while_they_are_saved(tmp_path, small_blocks):
    engine = engine_of(num_required=1)
    engine.run([LOG[0]])
    before = addresses_of(engine.core.tables.table("user"))
    engine.run(iter(LOG[1:]), checkpoint=tmp_path, every=2)
    assert addresses_of(engine.core.tables.table("user")) == before


def test_several_sources_have_a_position_each(tmp_path):
    logs = [write(tmp_path / f"{n}.arrows", log_of(range(4 * n, 4 * n + 4))) for n in range(3)]
    folder = tmp_path / "c"
    engine_of().run(logs[:2], limit=17, checkpoint=folder)
    engine = ps.Engine.restore(folder)
    assert engine.run(logs, checkpoint=folder, resume=True, flush=True).skipped == 17
    assert engine.state_hash() == unbroken()


@pytest.mark.parametrize("merge", ["step", "round"])
def test_merged_sources_have_a_position_each(tmp_path, merge):
    logs = [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(12)]) for n in range(3)]
    folder = tmp_path / "c"
    engine_of().run(logs, limit=17, checkpoint=folder, merge=merge)
    engine = ps.Engine.restore(folder)
    assert engine.run(logs, checkpoint=folder, merge=merge, resume=True, flush=True).skipped == 17
    assert engine.state_hash() == unbroken()
    with pytest.raises(StateError, match=f"made with --merge {merge}; resume it the same way"):
        ps.Engine.restore(folder).run(logs, resume=True)


def test_a_log_that_was_renamed_or_has_grown_is_recognised(tmp_path):
    folder = tmp_path / "c"
    engine_of().run(write(tmp_path / "a.arrows", LOG[:20]), checkpoint=folder)
    engine = ps.Engine.restore(folder)
    report = engine.run(write(tmp_path / "b.arrows", LOG), checkpoint=folder, resume=True, flush=True)
    assert (report.skipped, engine.state_hash()) == (20, unbroken())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (log_of(range(12), seed=1), "its first 20 frames are not those that the checkpoint holds"),
        ([LOG[1], LOG[0], *LOG[2:]], "its first 20 frames are not those that the checkpoint holds"),
        (LOG[1:], "its first 20 frames are not those that the checkpoint holds"),
        (LOG[:19], "ends after 19 frames"),
    ],
)
def test_another_source_is_refused_by_name_and_nothing_is_applied(tmp_path, batches, message):
    folder = tmp_path / "c"
    engine_of().run(write(tmp_path / "a.arrows", LOG), limit=20, checkpoint=folder)
    engine = ps.Engine.restore(folder)
    before = everything(engine), commits(folder)
    with pytest.raises(StateError, match=f"b.arrows: {message}"):
        engine.run(write(tmp_path / "b.arrows", batches), checkpoint=folder, resume=True)
    assert (everything(engine), commits(folder)) == before


def test_a_missing_source_is_named_on_resume(tmp_path):
    logs = [write(tmp_path / f"{n}.arrows", log_of([n])) for n in range(2)]
    engine_of().run(logs, checkpoint=tmp_path / "c")
    with pytest.raises(StateError, match=r"1\.arrows: the checkpoint holds 3 frames of it, and it is not among"):
        ps.Engine.restore(tmp_path / "c").run(logs[:1], resume=True)


def test_every_whole_frame_before_a_bad_row_is_committed(tmp_path):
    bad = batch(6).set_column(3, "id", pa.array([ROWS] * 40))
    folder = tmp_path / "c"
    engine = engine_of()
    with pytest.raises(InputError, match="id_out_of_range"):
        engine.run(write(tmp_path / "bad.arrows", [*LOG[:17], bad]), checkpoint=folder)
    other = ps.Engine.restore(folder)
    assert everything(other) == everything(engine)
    assert other.run(write(tmp_path / "good.arrows", LOG), resume=True, flush=True).skipped == 17
    assert other.state_hash() == unbroken()


def test_counters_add_up_over_all_runs(tmp_path):
    engine = engine_of()
    log = write(tmp_path / "log.arrows", LOG)
    engine.run(log, limit=10, checkpoint=tmp_path / "c")
    other = ps.Engine.restore(tmp_path / "c")
    other.run(log, resume=True, checkpoint=tmp_path / "c")
    totals = other.session.ledger.totals
    assert (totals.frames, totals.rows, totals.steps) == (36, 36 * 40, 12)


# ---- where a checkpoint may go


def test_a_folder_that_holds_a_checkpoint_can_only_be_resumed(tmp_path):
    engine_of().run(iter(LOG[:3]), checkpoint=tmp_path)
    with pytest.raises(UsageError, match="holds a checkpoint; resume it"):
        engine_of().run(iter(LOG), checkpoint=tmp_path)
    with pytest.raises(UsageError, match="holds commit 1, which this engine neither wrote nor was restored from"):
        engine_of().run(iter(LOG), checkpoint=tmp_path, resume=True)


def test_rows_loaded_or_applied_since_the_restore_are_in_the_next_commit(tmp_path):
    engine_of(num_required=1).run(iter(LOG[:3]), checkpoint=tmp_path)
    engine = ps.Engine.restore(tmp_path)
    engine.load_parameters("item", np.zeros((ROWS, 2)))
    engine.apply({"user": (np.arange(9), np.ones((9, 4), np.float32))})
    engine.run(iter(LOG), checkpoint=tmp_path, resume=True)
    assert everything(ps.Engine.restore(tmp_path)) == everything(engine)


def test_a_folder_of_other_files_and_a_file_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        engine_of().run(iter(LOG), checkpoint=tmp_path)
    with pytest.raises(UsageError, match="a checkpoint is a folder, this is a file"):
        engine_of().run(iter(LOG), checkpoint=tmp_path / "notes.txt")


def test_a_save_to_another_folder_during_a_run_is_a_separate_commit(tmp_path, small_blocks):
    engine = engine_of()
    for n, _ in enumerate(engine.stage(iter(LOG), checkpoint=tmp_path / "a", every=1)):
        if n == 4:
            engine.save(tmp_path / "b")
            middle = everything(engine)
    assert everything(ps.Engine.restore(tmp_path / "b")) == middle
    assert everything(ps.Engine.restore(tmp_path / "a")) == everything(engine)


def test_one_engine_does_not_commit_to_two_folders_at_once(tmp_path):
    engine = engine_of()
    for n, _ in enumerate(engine.stage(iter(LOG[:12]), checkpoint=tmp_path / "a", every=1)):
        if n == 2:
            with pytest.raises(UsageError, match=r"this engine commits to .*a at this moment"):
                engine.run(iter(LOG[12:]), checkpoint=tmp_path / "b")
    assert not (tmp_path / "b").exists() or not commits(tmp_path / "b")
    assert everything(ps.Engine.restore(tmp_path / "a")) == everything(engine)
    engine.run(iter(LOG[12:]), checkpoint=tmp_path / "b")  # after it, it may
    assert everything(ps.Engine.restore(tmp_path / "b")) == everything(engine)


@pytest.mark.parametrize("locks", [True, False])
def test_the_folder_of_a_run_in_progress_is_refused_and_the_run_continues(tmp_path, monkeypatch, locks, small_blocks):
    if not locks:  # as a store of objects
        monkeypatch.setattr(LocalStore, "lock", lambda store: store.file("").mkdir(exist_ok=True))
    engine, folder = engine_of(), tmp_path / "c"
    for n, _ in enumerate(engine.stage(iter(LOG[:12]), checkpoint=folder, every=1)):
        if n == 2:
            for commit in (engine.save, lambda path: engine.run(iter(LOG[12:]), checkpoint=path, resume=True)):
                with pytest.raises(UsageError, match="c: a run or a service of this engine commits there at this mom"):
                    commit(folder)
    assert everything(ps.Engine.restore(folder)) == everything(engine)
    engine.save(folder)  # after it, it may


def test_a_folder_is_not_locked_after_there_was_no_memory_for_its_commit(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("penstock.checkpoint.incremental.ring_bytes", lambda *_: 1 << 60)
        engine = engine_of()
        with pytest.raises(MemoryError):
            engine.save(tmp_path)
    engine_of().save(tmp_path)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_save_between_two_deltas_counts_the_frame_that_made_them(tmp_path, checkpoint):
    log = [each.drop_columns(["step"]) for each in LOG]  # no frame is stale, which would hide that it came twice
    saving = {"checkpoint": tmp_path / "a", "every": 1} if checkpoint else {}
    engine = engine_of(num_required=1)
    for n, _ in enumerate(engine.stage(iter(log), contribution_rows=40, **saving)):
        if n == 7:
            engine.save(tmp_path / "b")
    other = ps.Engine.restore(tmp_path / "b")
    assert other.run(iter(log), contribution_rows=40, resume=True).skipped == 8
    assert everything(other) == everything(engine)
    if checkpoint:
        assert everything(ps.Engine.restore(tmp_path / "a")) == everything(engine)


def test_a_run_during_one_that_commits_leaves_its_position_alone(tmp_path):
    engine = engine_of(num_required=1)
    # The last deltas come after the last frame and before the last commit.
    for _ in engine.stage(iter(LOG[:9]), checkpoint=tmp_path / "a", every=1, per_steps=100):
        engine.run(iter(LOG[9:12]))
    other = ps.Engine.restore(tmp_path / "a")
    assert [frames for _, frames, _ in other.session.positions.get_state()["sources"]] == [9]
    assert everything(other) == everything(engine)


def test_a_run_does_not_end_while_another_thread_pushes():
    class Runs(list):
        def remove(self, run):
            lock = engine.gate.still()
            may_push.append(in_thread(lambda: lock.acquire(blocking=False) and not lock.release())())
            super().remove(run)

    engine, may_push = engine_of(), []
    engine.session._runs = Runs()
    engine.run([LOG[0]])
    assert may_push == [False]


def test_a_commit_that_fails_in_a_pause_is_not_tried_again(tmp_path, monkeypatch):
    attempts = []

    def begin(saver):
        attempts.append(saver)
        raise OSError("no space")

    monkeypatch.setattr(Saver, "begin", begin)
    engine = engine_of()
    with pytest.raises(OSError, match="no space"):
        engine.run(iter(LOG), checkpoint=tmp_path, every=100, progress=lambda *_: engine.session._runs[0].idle())
    assert len(attempts) == 1


def test_every_without_a_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="give checkpoint= too"):
        engine_of().run([LOG[0]], every=3)
