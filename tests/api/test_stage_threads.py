"""Engine.stage while other threads apply steps: every delta is complete, and every change is in a delta."""

import itertools
import threading
import time

import pytest
from checkpoints import batch, engine_of
from deltas import ALL_COLUMNS, equal, follow, follower_of, step, tables_of
from limits import HANG_S, in_thread

import penstock as ps
from penstock.api.deltas import Deltas
from penstock.io.delta_format import DeltaForm

NEVER_STALE = 1 << 40


@pytest.fixture(autouse=True)
def deltas_of_many_batches(monkeypatch):
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 8)


def event_of_gate_request(gate, monkeypatch):
    """Return an event that is set when the main thread, the consumer, requests the gate's lock."""
    gate_requested, original_still = threading.Event(), gate.still

    def still():
        if threading.current_thread() is threading.main_thread():
            gate_requested.set()
        return original_still()

    monkeypatch.setattr(gate, "still", still)
    return gate_requested


def test_a_delta_does_not_end_while_a_step_reads_its_last_batch(monkeypatch):
    engine = engine_of(num_required=1)
    num_batches = len(list(engine_of(num_required=1).stage([batch(0)], **ALL_COLUMNS)))
    follower, reader = follower_of(engine), engine.stage([batch(0)], **ALL_COLUMNS)
    deltas = list(itertools.islice(reader, num_batches - 1))

    # The step's thread waits where it begins to make the last batch, until the consumer requests the gate's lock.
    batch_begun, gate_requested = threading.Event(), event_of_gate_request(engine.core.gate, monkeypatch)
    make_batch = DeltaForm.batch

    def make_batch_slowly(*arguments):
        if not gate_requested.is_set():
            batch_begun.set()
            assert gate_requested.wait(HANG_S)
        return make_batch(*arguments)

    monkeypatch.setattr(DeltaForm, "batch", make_batch_slowly)
    gate_requested.clear()
    join_step = in_thread(lambda: step(engine, [7]))
    assert batch_begun.wait(HANG_S)
    deltas += reader
    assert join_step() is True
    assert equal(follow(follower, deltas).tables, tables_of(engine))


def test_a_delta_does_not_end_while_a_step_refers_to_it(monkeypatch):
    engine = engine_of(num_required=1)
    num_batches = len(list(engine_of(num_required=1).stage([batch(0)], **ALL_COLUMNS)))
    follower, reader = follower_of(engine), engine.stage([batch(0)], **ALL_COLUMNS)
    deltas = list(itertools.islice(reader, num_batches))

    # The step's thread waits where its step has read the current delta, until the consumer, which has received all of
    # its batches, requests the gate's lock.
    step_begun, delta_seen = threading.Event(), threading.Event()
    gate_requested = event_of_gate_request(engine.core.gate, monkeypatch)

    class WatchedDeltas(Deltas):
        def before_step(self, coalesced):
            step_begun.set()
            super().before_step(coalesced)

        @property
        def _delta(self):
            delta = vars(self)["_delta"]
            if step_begun.is_set() and not delta_seen.is_set():
                delta_seen.set()
                assert gate_requested.wait(HANG_S)
            return delta

        @_delta.setter
        def _delta(self, delta):
            vars(self)["_delta"] = delta

    (watcher,) = (observer for observer in engine.core.observers if isinstance(observer, Deltas))
    watcher.__class__ = WatchedDeltas
    gate_requested.clear()
    join_step = in_thread(lambda: step(engine, [7]))
    assert delta_seen.wait(HANG_S)
    deltas += reader
    assert join_step() is True
    assert equal(follow(follower, deltas).tables, tables_of(engine))


# ---- with a checkpoint


def test_the_last_commit_contains_no_step_whose_delta_was_not_delivered(tmp_path):
    """From step 6 on, the consumer applies a step after every delta, so the engine always has a delta to deliver."""
    engine, last_step = engine_of(num_required=1), 0
    log = [batch(NEVER_STALE + n) for n in range(6)]
    for delta in engine.stage(iter(log), checkpoint=tmp_path, every=1, **ALL_COLUMNS):
        last_step = delta["step"][0].as_py()
        if last_step >= 6 and not delta["rows_left"][0].as_py():
            step(engine, [7])
    assert last_step >= 6
    assert ps.Engine.restore(tmp_path).global_step <= last_step < engine.global_step


def test_a_delta_file_continues_after_a_run_with_steps_of_another_thread(tmp_path):
    log = [batch(NEVER_STALE + n, rows=400) for n in range(12)]
    engine, stop_event = engine_of(num_required=1), threading.Event()
    output_options = {"checkpoint": tmp_path / "run", "deltas": tmp_path / "deltas.arrows"}

    def step_until_stopped():
        while not stop_event.is_set():
            step(engine, range(200))
            time.sleep(0.0002)
        return "stopped"

    join_step = in_thread(step_until_stopped)
    try:
        engine.run(iter(log[:6]), **output_options)
    finally:
        stop_event.set()
    assert join_step() == "stopped"
    restored = ps.Engine.restore(tmp_path / "run")
    assert restored.run(iter(log), resume=True, **output_options).skipped == 6
