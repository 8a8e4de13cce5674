"""The gate by itself, and the engine's gate with frames from several threads."""

import subprocess
import sys
import threading
from pathlib import Path

import engines
import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from engines import frame, zeroed
from limits import HANG_S, in_thread

import penstock as ps
from penstock.contrib.accumulators.taker_gate import TakerGate
from penstock.model.frames import MAX_CONTRIBUTORS

ROOT = Path(__file__).resolve().parents[2]


def nothing():
    pass


# ---- the rule


def test_a_frame_that_cannot_be_added_is_not_counted():
    def fail():
        raise MemoryError

    gate = TakerGate()
    with pytest.raises(MemoryError):
        gate.admit(None, fail, "a")
    assert gate.explain() == "0 gradients in; global step 0; no taker is waiting"


def test_callbacks_inside_the_gate_may_read_and_not_change_it():
    gate, seen = TakerGate(), []
    gate.admit(None, lambda: seen.append(gate.explain()))
    assert seen == ["0 gradients in; global step 0; no taker is waiting"]
    with pytest.raises(ps.UsageError, match="cannot be changed by what runs inside"):
        gate.admit(None, lambda: gate.admit(None, nothing))
    assert gate.num_accumulated == 1


def test_counts_of_a_service_that_never_ends_stay_small():
    gate = TakerGate(global_step=10**9)
    for number in range(3 * MAX_CONTRIBUTORS):
        gate.admit(number, nothing, number)
    stale = gate.stale
    assert stale.total == stale.by_contributor.total() == stale.by_lateness.total() == 3 * MAX_CONTRIBUTORS
    assert stale.by_contributor["others"] == 2 * MAX_CONTRIBUTORS
    assert len(stale.by_lateness) == 1


# ---- the engine's gate


def engine_of(**options):
    return zeroed(engines.engine_of(tables=("t", "u"), rows=50, reduction="sum", **options), rows=50)


def gradient(rng):
    ids = rng.integers(0, 50, 30)
    return ids, np.repeat(rng.integers(-9, 10, (30, 1)), 2, 1).astype(np.float32)


@pytest.mark.parametrize("num_required", [1, 3])
def test_threads_push_while_runs_drain_their_sources_and_every_frame_counts_once(num_required):
    engine = engine_of(num_required=num_required)
    wanted = {name: np.zeros(50) for name in ("t", "u")}
    reports, looks = [], []

    def expect(name, ids, rows):
        np.add.at(wanted[name], ids, rows[:, 0])

    frames = [[("t" if n % 2 else "u", *gradient(np.random.default_rng((w, n)))) for n in range(25)] for w in range(5)]
    for of_one in frames:
        for each in of_one:
            expect(*each)

    def pusher(worker):
        for name, ids, rows in frames[worker]:
            assert engine.apply({name: (ids, rows)}, contributor=worker)

    def runner(worker):
        batches = [
            pa.record_batch(
                {"id": ids, "gradient": pa.array(rows.tolist(), pa.list_(pa.float32(), 2)), "table": [name] * len(ids)}
            )
            for name, ids, rows in frames[worker]
        ]
        reports.append(engine.run(batches))

    def looker():
        for _ in range(20):
            looks.append(engine.lookup("t", range(50)).sum())
            engine.state_hash()

    calls = [*(lambda w=w: pusher(w) for w in range(3)), *(lambda w=w: runner(w) for w in (3, 4)), looker]
    for ended in [in_thread(call) for call in calls]:
        ended()
    engine.flush()
    for name, sums in wanted.items():
        assert engine.lookup(name, range(50))[:, 0].tolist() == (-sums).tolist()
    assert [report.frames for report in reports] == [25, 25]
    assert engine.global_step == -(-5 * 25 // num_required)
    assert len(looks) == 20


@pytest.mark.parametrize("step", ["a", 1.5, None, 2**63])
def test_a_global_step_is_a_whole_number(step):
    engine = engine_of()
    with pytest.raises(ps.UsageError, match="global_step: expected "):
        engine.gate.set_global_step(step)
    engine.gate.set_global_step(np.int64(3))
    assert (type(engine.global_step), engine.global_step) == (int, 3)


@pytest.mark.parametrize("how", ["apply", "run", "flush"])
def test_a_step_beyond_the_largest_is_refused_and_nothing_is_taken_in(how):
    engine = engine_of(num_required=2)
    engine.gate.set_global_step(2**63 - 1)
    assert engine.apply({"t": ([1], [[2.0, 2.0]])})
    state = engine.gate.get_state(), engine.state_hash()
    rows = batch([1], 2.0, table="t")
    call = {"apply": lambda: engine.apply({"t": ([1], [[2.0, 2.0]])}), "run": lambda: engine.run([rows])}
    with pytest.raises(ps.StateError, match="global step is 9223372036854775807, and the gate opens only from"):
        call.get(how, engine.flush)()
    assert (engine.gate.get_state(), engine.state_hash()) == state
    engine.gate.set_global_step(3)
    assert engine.flush()
    assert (engine.global_step, engine.lookup("t", [1]).tolist()) == (4, [[-2, -2]])


def test_a_stale_frame_that_is_refused_is_not_counted_as_stale(tmp_path):
    engine = engine_of()
    engine.gate.set_global_step(5)
    rows = batch([50], step=4, table="t")
    for call in (lambda: engine.apply({"t": frame([50])}, local_step=4, contributor="a"), lambda: engine.run([rows])):
        with pytest.raises(ps.InputError, match=r"expected 0 <= id < 50 .*, got 50"):
            call()
    assert (engine.gate.stale.total, engine.gate.explain()) == (
        0,
        "0 of 1 frames in; global step 5",
    )
    report = engine.run([rows], on_bad_row="drop")
    assert (report.stale, report.dropped, engine.gate.stale.total) == (1, {"id_out_of_range": 1}, 1)


def test_taking_from_the_engines_gate_is_refused():
    """A taker would count a step, and leave what the stores hold to the next one."""
    engine = engine_of(num_required=3)
    engine.apply({"t": ([1], [[2.0, 2.0]])})
    with pytest.raises(ps.StateError, match="opens into its own tables only"):
        engine.gate.take(1, lambda num: num)
    assert (engine.global_step, engine.gate.num_accumulated) == (0, 1)
    assert engine.flush()
    assert (engine.global_step, engine.lookup("t", [1]).tolist()) == (1, [[-2, -2]])


def test_the_engines_gate_explains_itself():
    engine = engine_of(num_required=3)
    engine.apply({"t": ([1], [[2.0, 2.0]])}, contributor="a")
    assert engine.gate.explain() == "1 of 3 frames in ('a': 1); global step 0"


def test_a_step_that_failed_in_one_thread_stops_the_frames_of_the_others(monkeypatch):
    engine, inside, go_on = engine_of(), threading.Event(), threading.Event()

    def lost(*_):
        inside.set()
        go_on.wait(HANG_S)
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.core.tables._groups[0], "apply", lost)
    caught = []

    def push(name):
        try:
            engine.apply({name: ([1], [[2.0, 2.0]])})
        except Exception as error:
            caught.append(error)

    first = threading.Thread(target=push, args=("t",))
    first.start()
    inside.wait(HANG_S)
    second = threading.Thread(target=push, args=("u",))  # past the check at the door, waits for the lock
    second.start()
    go_on.set()
    first.join(HANG_S)
    second.join(HANG_S)
    assert {type(error) for error in caught} == {RuntimeError, ps.StateError}  # whose thread is first to say so is open
    assert engine.core.pipeline.stores["u"].accumulator.num_rows == 0


def test_the_example_of_synchronous_replicas_equals_the_sequential_computation():
    command = [sys.executable, str(ROOT / "examples" / "sync_replicas.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 steps, 16 stale frames" in done.stdout
    assert "the tables equal those of the sequential computation" in done.stdout
