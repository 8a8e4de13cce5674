"""Frames that pass in runs give what they give one by one, for any batches, limits and observers."""

import itertools
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.base import interrupts
from penstock.base.errors import InputError
from penstock.checkpoint.commit_session import CommitSession
from penstock.core.engine_core import EngineCore
from penstock.core.observers import StepObserver
from penstock.io.decoding.batch_pieces import MAX_ROWS_AHEAD
from penstock.io.decoding.reader import joined
from penstock.model.frames import Frame, FrameRun
from penstock.pyx.gradient_blocks import GradientBlocks

ROWS, DIM = 20, 2
OPTIMIZERS = {"adagrad": ps.Adagrad, "sgd": ps.SGD, "adam": ps.Adam}


class EveryStep(StepObserver):
    """An observer that needs every step, as any does that does not say otherwise."""

    def __init__(self):
        self.steps = 0

    def pushed(self, pushed):
        self.steps += len(pushed.seconds)


def engine_of(one_by_one=False, optimizer="adagrad", **arguments):
    table = ps.TableConfig(ROWS, DIM, optimizer=OPTIMIZERS[optimizer](0.1), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), **arguments)
    if one_by_one:
        engine.observer = EveryStep()  # the core does not keep it alive
        engine.core.observe(engine.observer)
    return engine


def log_of(sizes, steps=None, seed=0, **spoilt):
    """Frames of these sizes as one batch. steps : of the frames; spoilt : row → id or a value of its gradient"""
    rng, rows = np.random.default_rng(seed), sum(sizes)
    ids, values = rng.integers(0, ROWS, rows), rng.standard_normal((rows, DIM)).astype(np.float32)
    for row, bad_id in spoilt.get("ids", {}).items():
        ids[row % rows] = bad_id
    for row, value in spoilt.get("values", {}).items():
        values[row % rows, 0] = value
    steps = range(len(sizes)) if steps is None else steps
    return batch(ids, values, DIM, step=pa.array(np.repeat(np.array(steps, np.int64), sizes)))


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
    """A report without times, sizes of memory, and the source and the batch that have the first bad row."""
    plain = report.to_dict() | dict.fromkeys(("seconds", "rows_per_s", "held_bytes"))
    return plain | {"notes": sorted(re.sub(r"\S+: batch \d+, row \d+", "", note) for note in plain["notes"])}


def outcome(batches, one_by_one, num_required=1, reduction="mean", optimizer="adagrad", threads=1, **options):
    engine = engine_of(one_by_one, optimizer, num_required=num_required, reduction=reduction, threads=threads)
    try:
        report = counted(engine.run(batches, **options))
    except InputError as error:
        report = (error.column, error.reason, error.problem)
    return state_of(engine), report


@pytest.fixture
def passed(monkeypatch):
    """The numbers of frames that passed together."""
    numbers, push_native = [], EngineCore._push_native

    def push(self, *arguments):
        pushed = push_native(self, *arguments)
        numbers.append(0 if pushed is None else pushed.num_frames)
        return pushed

    monkeypatch.setattr(EngineCore, "_push_native", push)
    return numbers


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=14)
CUTS = st.lists(st.integers(0, 60), max_size=6)


@given(
    SIZES,
    CUTS,
    st.none() | st.lists(st.integers(0, 9), min_size=14, max_size=14),
    st.dictionaries(st.integers(0, 60), st.sampled_from([-1, ROWS, 1 << 50]), max_size=1),
    st.dictionaries(st.integers(0, 60), st.sampled_from([np.nan, np.inf]), max_size=1),
    st.fixed_dictionaries(
        {
            "num_required": st.integers(1, 3),
            "reduction": st.sampled_from(["mean", "sum"]),
            "optimizer": st.sampled_from([*OPTIMIZERS]),
            "on_bad_row": st.sampled_from(["error", "drop"]),
            "limit": st.none() | st.integers(0, 12),
            "flush": st.booleans(),
            "contribution_rows": st.sampled_from([None, None, 2]),
        }
    ),
)
@settings(deadline=None)
def test_any_batches_of_a_log_give_what_its_frames_give_one_by_one(sizes, cuts, steps, ids, values, options):
    steps = None if steps is None else steps[: len(sizes)]
    if steps is not None and any(a == b for a, b in itertools.pairwise(steps)):
        steps = [2 * step + number % 2 for number, step in enumerate(steps)]  # neighbours are frames of their own
    log = log_of(sizes, steps, ids=ids, values=values)
    wanted = outcome([log], True, **options)
    for batches in ([log], cut(log, cuts), [log.slice(row, 1) for row in range(log.num_rows)]):
        assert outcome(iter(batches), False, **options) == wanted
        assert outcome(batches, False, **options) == wanted  # read ahead: nothing has to be waited for
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.arrows"
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, log.schema) as stream:
                for each in batches:
                    stream.write_batch(each)
            assert outcome(path, False, **options) == wanted  # batches are read at once


def test_a_batch_of_many_frames_passes_as_a_whole(passed):
    outcome(iter([log_of([3] * 1000)]), False)
    assert passed == [999, 1]  # the last frame might have continued


def test_batches_that_are_frames_are_runs_of_one_frame(passed):
    log = log_of([3] * 5).drop_columns(["step"])
    batches = [log.slice(row, 3) for row in range(0, 15, 3)]
    outcome(iter(batches), False)
    assert passed == [1] * 5
    outcome(batches, False)
    assert passed[5:] == [5]  # which need not be waited for, so that they pass together


@pytest.mark.parametrize("steps", [True, False])
def test_files_without_a_step_follow_files_with_one(tmp_path, steps):
    logs = [log_of([2, 1, 1]), log_of([2] * 20, seed=1).drop_columns(["step"])][:: 1 if steps else -1]
    for number, log in enumerate(logs):
        with pa.OSFile(str(tmp_path / f"{number}.arrows"), "wb") as file, pa.ipc.new_stream(file, log.schema) as stream:
            stream.write(log)
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


def test_quarantined_rows_and_what_is_left_are_those_frame_by_frame(tmp_path):
    log = log_of([1, 4, 2, 3, 5, 1, 1, 2] * 3, ids={3: -1, 4: ROWS, 30: 1 << 40}, values={17: np.nan, 31: np.inf})
    states, rows = [], []
    for number, (one_by_one, batches) in enumerate([(True, [log]), (False, [log]), (False, cut(log, [4, 18, 30]))]):
        file = tmp_path / f"{number}.arrow"
        states.append(outcome(batches, one_by_one, on_bad_row=f"quarantine={file}"))
        table = pa.ipc.open_file(file).read_all().drop_columns(["batch", "row_index"])
        rows.append(repr(table.to_pylist()))  # NaN is not equal to itself
    assert states[0] == states[1] == states[2]
    assert rows[0] == rows[1] == rows[2]
    assert states[0][1]["dropped"] == {"id_out_of_range": 3, "gradient_not_finite": 2}


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


@pytest.fixture
def begun(monkeypatch):
    """The steps at which commits begin, each of which is durable at once."""
    steps, begin = [], CommitSession.begin

    def begin_at(self):
        begin(self)
        steps.append(self._core.global_step)
        self._notified(self._saver.finish)

    monkeypatch.setattr(CommitSession, "begin", begin_at)
    return steps


@pytest.mark.parametrize("num_required", [1, 2])
def test_commits_are_made_in_the_middle_of_a_batch(tmp_path, begun, num_required):
    log, states = log_of([2] * 30), []
    for number, batches in enumerate([[log], [log], cut(log, [7, 8, 33])]):
        engine = engine_of(number == 0, num_required=num_required)
        engine.run(iter(batches), checkpoint=tmp_path / str(number), every=4, keep=100)
        restored = ps.Engine.restore(tmp_path / str(number))
        states.append((state_of(engine), state_of(restored), list(begun)))
        begun.clear()
    assert states[0] == states[1] == states[2]
    assert states[0][2][:3] == [4, 8, 12]


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
    assert state_of(ps.Engine.restore(tmp_path)) == outcome([log], True, checkpoint=tmp_path / "other")[0]


@pytest.mark.parametrize("limit", [0, 1, 6, 19, 20])
def test_a_resumed_run_continues_in_the_middle_of_a_batch(tmp_path, limit):
    log = log_of([1, 2, 3, 2] * 5)
    for one_by_one in (True, False):
        folder = tmp_path / str(one_by_one)
        engine_of(one_by_one).run(iter([log]), limit=limit, checkpoint=folder)
        engine = ps.Engine.restore(folder)
        engine.run(iter(cut(log, [9])), resume=True, checkpoint=folder)
        assert state_of(engine) == outcome([log], True, checkpoint=tmp_path / f"{one_by_one}-whole")[0]


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
    assert state_of(restored) == outcome([log], True, checkpoint=tmp_path / "whole")[0]


def rates_of(rates):
    table = ps.TableConfig(ROWS, DIM, optimizer=ps.SGD(rates), name="t")
    return ps.EmbeddingConfig.from_tables([table])


def test_every_step_has_the_rate_of_its_schedule(passed):
    log, steps = log_of([2] * 9), []

    def schedule(step):
        steps.append(step)
        return 0.5 / (1 + step)

    engine, other = ps.Engine(rates_of(schedule)), ps.Engine(rates_of(schedule))
    engine.run(iter([log]))
    other.run(iter([log.slice(row, 1) for row in range(18)]))
    assert steps == 2 * list(range(9))
    assert engine.state_hash() == other.state_hash()
    assert set(passed) == {0}


def test_constant_rates_of_tags_let_runs_pass(passed):
    config = rates_of(ps.DynamicLearningRate(0))
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
    assert state_of(engine) == outcome([log], True)[0]


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


def test_telemetry_counts_steps_and_updated_rows_of_runs():
    log = log_of([2] * 9)
    engine, other = engine_of(), engine_of(one_by_one=True)
    for each in (engine, other):
        each.run(iter([log]))
    for name in ("num_steps", "updated"):
        assert getattr(engine.watch, name) == getattr(other.watch, name)
    assert len(engine.watch.recent_s) == len(other.watch.recent_s)
