"""Frames that pass in runs give what they give one by one, for any batches, limits and observers."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from ipc import write

import penstock as ps
from penstock.base import interrupts
from penstock.base.errors import InputError
from penstock.checkpoint.commit_session import CommitSession
from penstock.core.observers import StepObserver
from penstock.io.decoding.batch_pieces import MAX_ROWS_AHEAD
from penstock.io.decoding.reader import joined
from penstock.model.frames import Frame, FrameRun
from penstock.pyx.gradient_blocks import GradientBlocks

ROWS, DIM = 20, 2


class EveryStep(StepObserver):
    """An observer that needs every step, as any does that does not say otherwise."""

    def __init__(self):
        self.steps = 0

    def pushed(self, pushed):
        self.steps += len(pushed.seconds)


def engine_of(one_by_one=False, **arguments):
    table = ps.TableConfig(ROWS, DIM, optimizer=ps.Adagrad(0.1), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), **arguments)
    if one_by_one:
        engine.observer = EveryStep()  # the core does not keep it alive
        engine.core.observe(engine.observer)
    return engine


def log_of(sizes, seed=0):
    """Frames of these sizes as one batch."""
    rng, rows = np.random.default_rng(seed), sum(sizes)
    ids, values = rng.integers(0, ROWS, rows), rng.standard_normal((rows, DIM)).astype(np.float32)
    return batch(ids, values, DIM, step=pa.array(np.repeat(np.arange(len(sizes)), sizes)))


def cut(whole, cuts):
    edges = [0, *sorted(min(row, whole.num_rows) for row in cuts), whole.num_rows]
    return [whole.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def state_of(engine):
    """All that a run leaves behind, as plain values."""
    positions = engine.session.positions.get_state()
    for source in positions["sources"]:
        source[0] = ""
    return engine.state_hash(), engine.core.gate.get_state(), engine.core.changed_step, positions


def counted(report):
    """A report without times and sizes of memory."""
    return report.to_dict() | dict.fromkeys(("seconds", "rows_per_s", "held_bytes"))


def left_by(batches, one_by_one, **options):
    """The state after a run."""
    engine = engine_of(one_by_one, threads=1)
    engine.run(batches, **options)
    return state_of(engine)


def test_a_batch_of_many_frames_passes_as_a_whole(passed):
    left_by(iter([log_of([3] * 1000)]), False)
    assert passed == [999, 1]  # the last frame might have continued


def test_batches_that_are_frames_are_runs_of_one_frame(passed):
    log = log_of([3] * 5).drop_columns(["step"])
    batches = [log.slice(row, 3) for row in range(0, 15, 3)]
    left_by(iter(batches), False)
    assert passed == [1] * 5
    left_by(batches, False)
    assert passed[5:] == [5]  # which need not be waited for, so that they pass together


@pytest.mark.parametrize("steps", [True, False])
def test_files_without_a_step_follow_files_with_one(tmp_path, steps):
    logs = [log_of([2, 1, 1]), log_of([2] * 20, seed=1).drop_columns(["step"])][:: 1 if steps else -1]
    for number, log in enumerate(logs):
        write(tmp_path / f"{number}.arrows", [log])
    engine, other = engine_of(), engine_of()
    report = engine.run(tmp_path, contribution_rows=4)
    for log in logs:  # the end of a source ends its frame, and a change of the step does so too
        other.run(iter([log]), contribution_rows=4)
    assert report.rows == 44
    assert state_of(engine)[:2] == state_of(other)[:2]


def test_large_batches_are_not_read_ahead():
    read = []

    def runs():
        for number in range(3):
            read.append(number)
            rows = np.zeros(MAX_ROWS_AHEAD, np.int64), np.zeros((MAX_ROWS_AHEAD, DIM), np.float32)
            blocks = GradientBlocks.of_arrays([rows])
            yield FrameRun("t", blocks, np.array([0, MAX_ROWS_AHEAD]), None, lambda _: Frame({}, 0))

    for number, _ in enumerate(joined(runs())):
        assert read == list(range(number + 1))


def test_a_damaged_batch_is_reported_after_the_frames_before_it():
    log = log_of([3] * 5).drop_columns(["step"])
    batches = [log.slice(row, 3) for row in range(0, 15, 3)]
    batches[3] = batches[3].set_column(0, "id", pa.array([1, None, 2], pa.int64()))
    engine = engine_of()
    with pytest.raises(InputError, match="batch 3, row 1, column 'id'"):
        engine.run(batches)
    assert (engine.global_step, engine.session.positions.num_frames) == (3, 3)


def test_an_observer_that_needs_every_step_gets_every_step():
    engine = engine_of(one_by_one=True)
    engine.run(iter([log_of([2] * 50)]))
    assert engine.observer.steps == 50


def test_progress_is_reported_after_every_frame():
    frames = []
    engine_of().run(iter([log_of([2] * 7)]), progress=lambda counters, *_: frames.append(counters.frames))
    assert frames == list(range(1, 8))


@pytest.mark.parametrize(
    "options", [{"per_steps": 3}, {"per_rows": 7}, {"per_steps": 4, "per_rows": 9}, {"per_seconds": 0}, {}]
)
@pytest.mark.parametrize("num_required", [1, 2])
def test_deltas_are_cut_where_they_are_cut_frame_by_frame(tmp_path, options, num_required):
    log, files = log_of([1, 4, 2, 3, 5, 1, 1, 2, 3, 4, 5, 2, 1]), []
    for one_by_one, batches in ((True, [log]), (False, [log]), (False, cut(log, [5, 6, 20, 21]))):
        files.append(tmp_path / f"{len(files)}.arrow")
        engine_of(one_by_one, num_required=num_required).run(iter(batches), deltas=files[-1], **options)
    contents = [pa.ipc.open_stream(path).read_all().to_pylist() for path in files]
    assert contents[0] == contents[1] == contents[2]
    staged = engine_of(num_required=num_required).stage(iter([log]), **options).read_all().to_pylist()
    assert staged == [{name: row[name] for name in staged[0]} for row in contents[0]]


def test_a_commit_has_no_frame_after_the_one_that_made_it_due(tmp_path, monkeypatch):
    begin, gates = CommitSession.begin, []

    def begin_at(self):
        gates.append((self._core.global_step, self._core.gate.num_accumulated))
        begin(self)
        self._notified(self._saver.finish)

    monkeypatch.setattr(CommitSession, "begin", begin_at)
    engine_of(num_required=3).run(iter([log_of([2] * 31)]), checkpoint=tmp_path, every=4)
    assert gates == [(4, 0), (8, 0), (10, 1)]


def test_a_commit_in_flight_has_the_rows_of_its_step(tmp_path):
    log = log_of([2] * 200)
    engine_of().run(iter([log]), checkpoint=tmp_path, every=1, keep=500)
    assert state_of(ps.Engine.restore(tmp_path)) == left_by([log], True, checkpoint=tmp_path / "other")


def test_an_interrupt_comes_between_two_frames_and_every_whole_frame_is_committed(tmp_path, monkeypatch):
    log, calls = log_of([4] * 20_000), []

    def check():
        calls.append(None)
        if len(calls) == 3:  # the first call is of the reader
            raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "check", check)
    engine = engine_of()
    with pytest.raises(KeyboardInterrupt):
        engine.run(iter([log]), checkpoint=tmp_path)
    assert 0 < engine.global_step < 20_000  # a signal waits for some frames, not for the batch
    restored = ps.Engine.restore(tmp_path)
    assert state_of(restored) == state_of(engine)
    assert restored.session.positions.num_frames == engine.global_step
    restored.run(iter([log]), resume=True, checkpoint=tmp_path)
    assert state_of(restored) == left_by([log], True, checkpoint=tmp_path / "whole")


def test_constant_rates_of_tags_let_runs_pass(passed):
    table = ps.TableConfig(ROWS, DIM, optimizer=ps.SGD(ps.DynamicLearningRate(0)), name="t")
    config = ps.EmbeddingConfig.from_tables([table])
    engine, other = ps.Engine(config), ps.Engine(config)
    other.observer = EveryStep()
    other.core.observe(other.observer)
    log = log_of([2] * 9)
    reports = [each.run(iter([log]), learning_rates=[0.25]) for each in (engine, other)]
    assert counted(reports[0]) == counted(reports[1])
    assert engine.state_hash() == other.state_hash()
    assert 8 in passed


def test_other_tables_keep_their_sums_until_the_gate_opens(passed):
    tables = [ps.TableConfig(ROWS, DIM, optimizer=ps.Adagrad(0.1), name=name) for name in ("t", "u")]
    engines = [ps.Engine(ps.EmbeddingConfig.from_tables(tables), num_required=3) for _ in range(2)]
    engines[1].observer = EveryStep()
    engines[1].core.observe(engines[1].observer)
    for engine in engines:
        engine.apply({"u": (np.array([3]), np.ones((1, DIM), np.float32))})
        engine.run(iter([log_of([2] * 9)]), table="t")
    assert engines[0].state_hash() == engines[1].state_hash()
    assert engines[0].core.gate.get_state() == engines[1].core.gate.get_state()
    assert max(passed) > 1


def test_no_memory_for_a_run_leaves_its_frames_to_be_pushed_one_by_one(monkeypatch):
    class Full:
        def take(self, *_):
            raise MemoryError("no memory for a run")

    log, engine = log_of([2] * 9), engine_of()
    monkeypatch.setitem(engine.core._frame_steps, "t", Full())
    engine.run(iter([log]))
    assert state_of(engine) == left_by([log], True)


@pytest.mark.parametrize("optimizer", [ps.Adam(0.1, lazy_adam=False), ps.Adagrad(0.1, use_gradient_accumulation=False)])
def test_tables_that_every_step_concerns_take_the_longer_way(passed, optimizer):
    table = ps.TableConfig(ROWS, DIM, optimizer=optimizer, name="t")
    engines = [ps.Engine(ps.EmbeddingConfig.from_tables([table])) for _ in range(2)]
    log = log_of([2] * 9)
    engines[0].run(iter([log]))
    for row in range(0, 18, 2):
        engines[1].run(iter([log.slice(row, 2)]))
    assert engines[0].state_hash() == engines[1].state_hash()
    assert set(passed) == {0}
