"""Rounds: one hash for any order in which the frames of workers arrive, over commits and resumes."""

import gc
import tempfile
import weakref
from collections import Counter

import evidence
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from round_oracle import CONFIGS, DIM, ROWS, cases, expected

import penstock as ps


@evidence.examples(2000, 50)
@given(cases())
def test_any_order_of_arrival_gives_the_sums_in_the_order_of_the_workers(case):
    names = [f"rank-{worker}" for worker in range(len(case.streams))]
    config = CONFIGS[case.table]
    message = config.to_engine_proto()
    message.gate.rounds.workers, message.gate.rounds.ahead = len(names), 100
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(message), reduction=case.reduction)
    sent, results = [0] * len(names), Counter()
    for number, worker in enumerate([*case.order, None]):
        if number in case.saves:
            with tempfile.TemporaryDirectory() as folder:
                engine.save(folder)
                engine = ps.Engine.restore(folder)
        if worker is None:
            break
        step, ids, grads = case.streams[worker][sent[worker]]
        sent[worker] += 1
        buffer = grads.copy()
        results[engine.apply({"t": (ids, buffer)} if len(ids) else {}, local_step=step, contributor=names[worker])] += 1
        buffer[:] = np.nan  # the caller's memory is its own again
    steps = expected(case)
    reference = ps.Engine(config, num_required=len(names), reduction=case.reduction)
    for taken in steps:
        for worker in range(len(names)):
            _, ids, grads = taken.get(worker, (None, [], []))
            reference.apply({"t": (ids, grads)} if len(ids) else {}, contributor=names[worker])
    assert engine.global_step == reference.global_step == len(steps)
    assert engine.state_hash() == reference.state_hash()
    applied = sum(map(len, steps))
    assert results[True] == applied + engine.gate.num_accumulated
    assert results[False] == engine.gate.stale.total


def test_nobody_is_waited_for_while_a_step_is_computed(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("penstock.core.rounds.time.monotonic", lambda: seconds[0])
    engine = engine_of()
    step = engine.core._step

    def slow_step(*arguments):
        seconds[0] += 5.0
        return step(*arguments)

    monkeypatch.setattr(engine.core, "_step", slow_step)
    frame = {"t": ([1], np.ones((1, DIM), np.float32))}
    engine.apply(frame, local_step=0, contributor="rank-1")
    engine.apply(frame, local_step=1, contributor="rank-1")
    engine.apply(frame, local_step=0, contributor="rank-0")
    assert (engine.global_step, engine.core.turns.waited_s) == (1, 0.0)


def engine_of(workers=2, optimizer=None, **arguments):
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), optimizer or ps.SGD(1.0), name="t")
    return ps.Engine(ps.EmbeddingConfig.from_tables([table]), workers=workers, reduction="sum", **arguments)


ONES = {"t": ([1], [[1.0, 1.0]])}


def test_a_step_takes_one_frame_of_each_worker():
    """The inputs with which two frames of one worker made a step, and the other one's frame was stale."""
    engine = engine_of()
    assert engine.apply(ONES, local_step=0, contributor="rank-0")
    assert engine.apply(ONES, local_step=1, contributor="rank-0")
    assert engine.global_step == 0
    assert engine.gate.num_accumulated == 2
    assert engine.apply(ONES, local_step=0, contributor="rank-1")
    assert engine.global_step == 1
    assert "waits for rank-1" in engine.gate.explain()


def test_logs_of_different_lengths_make_no_step_of_one_worker_alone():
    batches = [pa.table({"step": [step], "id": [1], "gradient": [[1.0, 1.0]]}) for step in range(4)]
    engine = engine_of()
    report = engine.run([pa.concat_tables(batches), batches[0]])
    assert (report.frames, report.steps, report.pending, report.stale) == (5, 1, 3, 0)
    assert report.notes[-1] == "step 1 waits for rank-1; 2 of 'rank-0' wait for their turn"
    flushed = engine_of()
    assert flushed.run([pa.concat_tables(batches), batches[0]], flush=True).steps == 2
    assert flushed.gate.num_accumulated == 2


def test_a_step_without_a_frame_of_a_worker_counts_it_as_absent_and_all_of_them_are_an_error():
    engine = engine_of()
    engine.apply(ONES, local_step=2, contributor="rank-1")
    for step in range(3):
        engine.apply(ONES, local_step=step, contributor="rank-0")
    assert engine.global_step == 3
    engine.apply(ONES, local_step=5, contributor="rank-0")
    with pytest.raises(ps.InputError, match=r"no worker has a frame of step 3: the smallest step is 5; send the"):
        engine.apply(ONES, local_step=6, contributor="rank-1")
    assert engine.apply(ONES, local_step=3, contributor="rank-1")
    assert engine.global_step == 4
    rows = pa.table({"step": [4, 7], "id": [1, 1], "gradient": [[1.0, 1.0]] * 2, "contributor": ["rank-1"] * 2})
    assert engine.run(rows).absent == {"rank-1": 1}


@pytest.mark.parametrize(
    ("workers", "contributor", "message"),
    [
        (2, "rank-2", "expected a frame of one of the workers (rank-0, rank-1), got one of 'rank-2'"),
        (2, "rank-01", "expected a frame of one of the workers (rank-0, rank-1), got one of 'rank-01'"),
        (2, None, "expected a frame of one of 2 workers (rank-0, rank-1), got one that names no contributor"),
        (["a", "b"], "c", "expected a frame of one of the workers (a, b), got one of 'c'"),
    ],
)
def test_a_frame_of_somebody_else_is_refused_by_name(workers, contributor, message):
    engine = engine_of(workers)
    with pytest.raises(ps.InputError) as caught:
        engine.apply(ONES, contributor=contributor)
    assert str(caught.value) == f"apply(): {message}"
    assert engine.gate.num_accumulated == 0


def test_numbered_workers_have_one_spelling_and_a_single_worker_needs_no_name():
    engine = engine_of()
    engine.apply(ONES, contributor=1)
    with pytest.raises(ps.InputError, match="a frame of worker 'rank-0', where others are named as '0'"):
        engine.apply(ONES, contributor="rank-0")
    assert engine.apply(ONES, contributor="0")
    assert engine.global_step == 1
    alone = engine_of(1)
    assert alone.apply(ONES)
    assert alone.global_step == 1


def test_frames_of_a_step_have_the_same_learning_rates():
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(ps.DynamicLearningRate(0)), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), workers=2, reduction="sum")
    rows = {"id": [1], "gradient": [[1.0, 1.0]]}

    def push(worker, step, rate):
        columns = {**rows, "step": [step], "contributor": [worker], "learning_rates": [[rate]]}
        engine.run(pa.table(columns))

    push("rank-1", 0, 0.5)
    with pytest.raises(ps.InputError, match=r"learning rates \[0.25\] of worker .rank-0. for step 0, where"):
        push("rank-0", 0, 0.25)
    push("rank-1", 1, 0.25)
    push("rank-0", 0, 0.5)
    push("rank-0", 1, 0.25)
    assert engine.global_step == 2
    assert engine.lookup("t", [1]).tolist() == [[-1.5, -1.5]]


def test_an_early_frame_is_forgotten_after_its_turn():
    engine, rows = engine_of(["a", "b"]), weakref.WeakSet()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            for name in ("b", "a"):
                engine.apply({"t": ([1], [[1.0, 2.0]])}, contributor=name)
                rows |= {each.frame for early in engine.core.turns._early.values() for each in early}
        assert len(rows) == 0
    finally:
        gc.enable()


def test_a_worker_that_is_far_ahead_is_told_who_is_missing():
    engine = engine_of(3)
    for step in range(3):
        engine.apply(ONES, local_step=step, contributor="rank-0")
    with pytest.raises(
        ps.UsageError,
        match="worker 'rank-0' has 2 frames that wait, and step 0 waits for rank-1, rank-2: apply their frames first",
    ):
        engine.apply(ONES, local_step=3, contributor="rank-0")
    assert engine.gate.num_accumulated == 3
    with pytest.raises(
        ps.UsageError, match="set_global_step: 3 frames wait in a round, the first for step 0; flush them"
    ):
        engine.gate.set_global_step(7)


def test_a_sum_that_is_not_finite_is_that_of_the_later_worker_whoever_arrives_last():
    large, hashes = {"t": ([1], [[3e38, 0.0]])}, set()
    for order in ((0, 1), (1, 0)):
        engine = engine_of()
        engine.apply(large, contributor=order[0])
        with pytest.raises(ps.InputError, match=r"step 0, worker '1': expected a sum .* id 1 of table 't' is not"):
            engine.apply(large, contributor=order[1])
        assert engine.global_step == 0
        engine.apply(ONES, contributor=1)  # in its place
        assert engine.global_step == 1
        hashes.add(engine.state_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("names", [["rank-0", "rank-1"], ["rank-1", "rank-0"]])
def test_rows_whose_sum_is_not_finite_are_errors_or_dropped_and_counted_in_any_order(names, stops, tmp_path):
    """Also where the frame waits in a commit."""
    rows = {"step": [0, 0], "id": [1, 1], "gradient": [[3e38, 0.0]] * 2, "contributor": names}
    for mode in ("error", "drop"):
        engine, folder = engine_of(), tmp_path / mode
        if stops:
            engine.run(pa.table(rows), limit=1, checkpoint=folder, on_bad_row=mode)
            engine = ps.Engine.restore(folder)
        options = {"checkpoint": folder, "resume": stops, "on_bad_row": mode}
        if mode == "error":
            with pytest.raises(ps.InputError, match=r"step 0, worker 'rank-1'|expected a sum that is finite"):
                engine.run(pa.table(rows), **options)
            assert engine.global_step == 0
        else:
            report = engine.run(pa.table(rows), **options)
            assert (report.steps, report.dropped) == (1, {"sum_not_finite": 1})


def test_other_workers_may_resume_only_an_empty_gate(tmp_path):
    engine = engine_of()
    engine.save(tmp_path / "empty")
    assert ps.Engine.restore(tmp_path / "empty", workers=3).gate.num_required == 3
    engine.apply(ONES, contributor="rank-0")
    engine.save(tmp_path / "held")
    with pytest.raises(
        ps.StateError, match="1 frames in its gate wait for workers 2, not workers 3: resume with these"
    ):
        ps.Engine.restore(tmp_path / "held", workers=3)
    restored = ps.Engine.restore(tmp_path / "held")
    assert "waits for rank-1" in restored.gate.explain()
    assert restored.flush()
    assert restored.global_step == 1


def test_a_rollback_drops_the_frames_that_wait(tmp_path):
    engine = engine_of()
    engine.save(tmp_path)
    engine.tag("start")
    for step in range(2):
        engine.apply(ONES, local_step=step, contributor="rank-1")
    assert engine.rollback("start") == 1
    assert engine.gate.num_accumulated == 0
    for worker in (1, 0):
        assert engine.apply(ONES, local_step=1, contributor=f"rank-{worker}")
    assert engine.global_step == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"workers": "a,b"}, "workers: expected a number, or a list of names, got the text 'a,b'"),
        ({"workers": ["a", "a"]}, "workers: expected names that differ, got a, a"),
        ({"workers": []}, "workers: expected names that differ, got none"),
        ({"workers": 2, "num_required": 2}, "num_required and workers: give one"),
        ({"workers": 2, "max_staleness": 1}, "max_staleness 1: rounds take no frame that is behind"),
        ({"max_staleness": -1}, "max_staleness: expected at least 0, got -1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(ps.UsageError) as caught:
        ps.Engine(CONFIGS["plain"], **arguments)
    assert str(caught.value).startswith(message)


# ---- staleness


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(0, 4), st.integers(1, 3))
def test_frames_at_most_so_many_steps_behind_are_applied(steps, most, num_required):
    """Frames of a stream, which native code would take, and the same ones by name."""
    rows = pa.table(
        {"step": steps, "id": [n % ROWS for n in range(len(steps))], "gradient": [[1.0, 2.0]] * len(steps)},
        pa.schema({"step": pa.int64(), "id": pa.int64(), "gradient": pa.list_(pa.float32(), DIM)}),
    )
    engine = ps.Engine(CONFIGS["plain"], num_required=num_required, max_staleness=most)
    report = engine.run(rows, contribution_rows=1)
    step, held, late, stale = 0, 0, Counter(), 0
    for each in steps:
        if step - each > most:
            stale += 1
            continue
        if step > each:
            late[step - each] += 1
        held += 1
        if held == num_required:
            step, held = step + 1, 0
    assert (report.steps, report.stale, report.pending, report.late) == (step, stale, held, late.total())
    assert engine.gate.late == dict(sorted(late.items()))


# ---- replays


def logs_of(folder, seed, workers=3, steps=6):
    """Write a log per worker, with steps that it leaves out, frames without rows and two batches per frame."""
    rng = np.random.default_rng(seed)
    schema = pa.schema({"step": pa.int64(), "id": pa.int64(), "gradient": pa.list_(pa.float32(), DIM)})
    paths = [folder / f"{worker}.arrows" for worker in range(workers)]
    for worker, path in enumerate(paths):
        with pa.ipc.new_stream(path, schema) as log:
            for step in range(steps):
                if worker and rng.random() < 0.2:
                    continue
                num = 0 if rng.random() < 0.2 else 2 * int(rng.integers(1, 4))
                columns = {"step": [step] * num, "id": rng.integers(0, ROWS, num).tolist()}
                batch = pa.RecordBatch.from_pydict(
                    {**columns, "gradient": rng.normal(size=(num, DIM)).astype(np.float32).tolist()}, schema
                )
                log.write_batch(batch.slice(0, num // 2))
                log.write_batch(batch.slice(num // 2), {"penstock.end": "", "penstock.step": str(step)})
    return paths


@pytest.mark.parametrize("table", ["plain", "keyed", "cached"])
def test_a_replay_that_is_stopped_and_resumed_anywhere_has_the_hash_of_a_whole_one(table, tmp_path):
    paths = logs_of(tmp_path, 1)
    whole = ps.Engine(CONFIGS[table], workers=3)
    report = whole.run(paths)
    assert report.steps == 6
    for stops in ([1, 2], [4], [7, 9], [12]):
        folder = tmp_path / "-".join(map(str, stops))
        engine = ps.Engine(CONFIGS[table], workers=3)
        for stop in stops:
            engine.run(paths, limit=stop, checkpoint=folder, resume=stop != stops[0])
            engine = ps.Engine.restore(folder)
        last = engine.run(paths, checkpoint=folder, resume=True)
        assert (last.skipped, last.pending) == (stops[-1], report.pending)
        assert engine.state_hash() == whole.state_hash()


def test_sources_may_be_read_in_any_order(tmp_path):
    paths = logs_of(tmp_path, 2)
    hashes = set()
    for merge in (None, "step", "round"):
        engine = ps.Engine(CONFIGS["plain"], workers=["a", "b", "c"])
        engine.run(paths, merge=merge)
        hashes.add(engine.state_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("step", ["x", "1.5", str(1 << 63)])
def test_the_step_of_a_frame_without_rows_is_an_integer(step, tmp_path):
    schema = pa.schema({"step": pa.int64(), "id": pa.int64(), "gradient": pa.list_(pa.float32(), DIM)})
    with pa.ipc.new_stream(tmp_path / "log.arrows", schema) as log:
        log.write_batch(pa.RecordBatch.from_pylist([], schema), {"penstock.end": "", "penstock.step": step})
    with pytest.raises(ps.InputError, match=r"metadata penstock\.step: expected an int64, got"):
        ps.Engine(CONFIGS["plain"], workers=1).run(tmp_path / "log.arrows")


def test_frames_of_one_source_that_are_far_ahead_end_it_with_the_names(tmp_path):
    names = ["rank-0"] * 4 + ["rank-1"] * 4
    rows = {"step": [*range(4)] * 2, "id": [1] * 8, "gradient": [[1.0, 1.0]] * 8, "contributor": names}
    engine = engine_of()
    engine.core.turns.most_bytes = 1
    with pytest.raises(ps.InputError, match=r"worker 'rank-0' is too far ahead: 32 bytes .* and step 0 for rank-1"):
        engine.run(pa.table(rows))
    assert engine.gate.num_accumulated == 3
    assert engine_of().run(pa.table(rows)).steps == 4


def test_a_configuration_may_say_who_the_workers_are(tmp_path):
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(1.0), name="t")
    config = ps.EmbeddingConfig.from_tables([table], workers=["a", "b"], reduction="sum")
    config.save(tmp_path / "c.pbtxt")
    engine = ps.Engine(ps.EmbeddingConfig.load(tmp_path / "c.pbtxt"))
    assert engine.apply(ONES, contributor="b")
    assert engine.apply(ONES, contributor="a")
    assert engine.global_step == 1
    late = ps.EmbeddingConfig.from_tables([table], max_staleness=2)
    assert not ps.Engine(late).gate.is_stale(-2)
    assert ps.Engine(late).gate.is_stale(-3)
    with pytest.raises(ps.ConfigError, match="max_staleness 1: rounds take no frame that is behind"):
        ps.EmbeddingConfig.from_tables([table], workers=2, max_staleness=1)


def test_rates_given_with_frames_are_those_of_their_step_in_any_order():
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(ps.DynamicLearningRate(0)), name="t")
    config, hashes = ps.EmbeddingConfig.from_tables([table], workers=2, reduction="sum"), set()
    calls = [("rank-0", 0, 0.5), ("rank-0", 1, 0.25), ("rank-1", 1, 0.25)]  # rank-1 is absent in step 0
    for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
        engine = ps.Engine(config)
        for worker, step, rate in (calls[number] for number in order):
            engine.apply(ONES, local_step=step, contributor=worker, learning_rates=[rate])
        assert engine.global_step == 2
        hashes.add(engine.state_hash())
    assert len(hashes) == 1
    engine.apply(ONES, local_step=2, contributor="rank-1", learning_rates=[0.5])
    with pytest.raises(ps.InputError, match="the frames of a step have the same"):
        engine.apply(ONES, local_step=2, contributor="rank-0", learning_rates=[0.25])


def test_a_step_in_which_no_worker_has_rows_needs_no_rates():
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(ps.DynamicLearningRate(0)), name="t")
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], workers=1))
    schema = pa.schema(
        {
            "step": pa.int64(),
            "id": pa.int64(),
            "gradient": pa.list_(pa.float32(), DIM),
            "learning_rates": pa.list_(pa.float32()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as log:
        for step in range(3):
            rows = [{"step": step, "id": 1, "gradient": [1.0, 1.0], "learning_rates": [0.5]}] * (step == 1)
            log.write_batch(pa.RecordBatch.from_pylist(rows, schema), {"penstock.end": "", "penstock.step": str(step)})
    assert engine.run(pa.ipc.open_stream(sink.getvalue())).steps == 3
    assert engine.lookup("t", [1]).tolist() == [[-0.5, -0.5]]


def test_a_gap_at_the_start_can_be_stepped_over(tmp_path):
    for leave in ("flush", "set"):
        engine = engine_of()
        engine.apply(ONES, local_step=5, contributor="rank-0")
        with pytest.raises(ps.InputError, match="no worker has a frame of step 0: the smallest step is 5"):
            engine.apply(ONES, local_step=5, contributor="rank-1")
        if leave == "set":
            engine.gate.set_global_step(5)
            assert engine.apply(ONES, local_step=5, contributor="rank-1")
        else:
            assert engine.flush()
        assert engine.global_step == 6


def test_a_wait_begins_with_the_first_frame_that_waits():
    engine = engine_of()
    for step in range(2):
        engine.core.turns._since_s -= 1000  # nothing has come for so long
        engine.apply(ONES, local_step=step, contributor="rank-1")
        assert engine.core.turns.waited_s < 500
        engine.apply(ONES, local_step=step, contributor="rank-0")


def test_a_commit_of_rounds_says_so_to_another_gate(tmp_path):
    engine_of().save(tmp_path / "c")
    with pytest.raises(ps.StateError, match="was made with rounds of workers 2, not num_required 2"):
        ps.Engine.restore(tmp_path / "c", num_required=2)
    table = ps.TableConfig(ROWS, DIM, ps.Constant(0.0), ps.SGD(1.0), name="t")
    ps.Engine(ps.EmbeddingConfig.from_tables([table], reduction="sum"), num_required=2).save(tmp_path / "f")
    config = ps.EmbeddingConfig.from_tables([table], workers=3, reduction="sum")
    assert ps.Engine.restore(tmp_path / "f", config=config).core.policy.workers == 3


def test_a_smaller_global_step_begins_anew():
    engine = engine_of()
    for worker in ("rank-0", "rank-1"):
        engine.apply(ONES, local_step=0, contributor=worker)
    engine.gate.set_global_step(0)
    for worker in ("rank-0", "rank-1"):
        assert engine.apply(ONES, local_step=0, contributor=worker)
    assert engine.global_step == 1
