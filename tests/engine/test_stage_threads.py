"""Engine.stage while other threads step: every delta is whole, and every change is in one."""

import itertools
import threading
import time

import numpy as np
import pytest
from checkpoints import batch, engine_of
from deltas import WHOLE, equal, follow, follower_of, step, tables_of
from limits import HANG_S, in_thread

import penstock as ps
from penstock.deltas import Deltas
from penstock.io.delta_format import DeltaForm

NEVER_STALE = 1 << 40


@pytest.fixture(autouse=True)
def deltas_of_many_batches(monkeypatch):
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 8)


def consumer_asks_for(gate, monkeypatch):
    """An event: this thread has asked for a gate's lock."""
    asked, still = threading.Event(), gate.still

    def asking():
        if threading.current_thread() is threading.main_thread():
            asked.set()
        return still()

    monkeypatch.setattr(gate, "still", asking)
    return asked


def test_a_delta_is_not_over_while_a_step_reads_its_last_batch(monkeypatch):
    engine = engine_of(num_required=1)
    num_batches = len(list(engine_of(num_required=1).stage([batch(0)], **WHOLE)))
    follower, reader = follower_of(engine), engine.stage([batch(0)], **WHOLE)
    deltas = list(itertools.islice(reader, num_batches - 1))

    # The step stops where it has begun to read the last batch, until the consumer asks for the gate.
    reading, consumer_waits = threading.Event(), consumer_asks_for(engine.core.gate, monkeypatch)
    make_batch = DeltaForm.batch

    def make_batch_slowly(*arguments):
        if not consumer_waits.is_set():
            reading.set()
            assert consumer_waits.wait(HANG_S)
        return make_batch(*arguments)

    monkeypatch.setattr(DeltaForm, "batch", make_batch_slowly)
    consumer_waits.clear()
    stepped = in_thread(lambda: step(engine, [7]))
    assert reading.wait(HANG_S)
    deltas += reader
    assert stepped() is True
    assert equal(follow(follower, deltas).tables, tables_of(engine))


def test_a_delta_does_not_end_under_a_step_that_has_found_it(monkeypatch):
    engine = engine_of(num_required=1)
    num_batches = len(list(engine_of(num_required=1).stage([batch(0)], **WHOLE)))
    follower, reader = follower_of(engine), engine.stage([batch(0)], **WHOLE)
    deltas = list(itertools.islice(reader, num_batches))

    # The step stops where it has found a delta, until the consumer, who has all of it, asks for the gate.
    actual, consumer_waits = threading.Event(), consumer_asks_for(engine.core.gate, monkeypatch)

    class Watched(Deltas):
        @property
        def _delta(self):
            delta = vars(self)["_delta"]
            if threading.current_thread() is not threading.main_thread() and not actual.is_set():
                actual.set()
                assert consumer_waits.wait(HANG_S)
            return delta

        @_delta.setter
        def _delta(self, delta):
            vars(self)["_delta"] = delta

    (watcher,) = (observer for observer in engine.core.observers if isinstance(observer, Deltas))
    watcher.__class__ = Watched
    consumer_waits.clear()
    stepped = in_thread(lambda: step(engine, [7]))
    assert actual.wait(HANG_S)
    deltas += reader
    assert stepped() is True
    assert equal(follow(follower, deltas).tables, tables_of(engine))


def test_deltas_are_whole_wherever_a_step_meets_their_consumer(monkeypatch):
    """A step begins when half of a delta has been read, and the rest is asked for a little later."""
    engine, random = engine_of(num_required=1), np.random.default_rng(5)
    monkeypatch.setattr("penstock.io.delta_format.MOST_ROWS", 32)
    follower, begin, over = follower_of(engine), threading.Semaphore(0), threading.Event()
    deltas = engine.stage((batch(NEVER_STALE + n, rows=80) for n in range(500)), **WHOLE)

    def steps():
        while not over.is_set():
            begin.acquire()
            step(engine, [7])
        return "over"

    stepped = in_thread(steps)
    try:
        for delta in deltas:
            follower.take(delta)
            begin.release()
            time.sleep(random.uniform(0, 0.001))
    finally:
        over.set()
        begin.release()
    assert stepped() == "over"
    follower.end()


# ---- with a checkpoint


def test_the_last_commit_holds_no_step_that_was_not_handed_out(tmp_path):
    """The consumer steps whenever it has a delta of the end, so that there is always one that it has not seen."""
    engine, last = engine_of(num_required=1), 0
    log = [batch(NEVER_STALE + n) for n in range(6)]
    for delta in engine.stage(iter(log), checkpoint=tmp_path, every=1, **WHOLE):
        last = delta["step"][0].as_py()
        if last >= 6 and not delta["rows_left"][0].as_py():
            step(engine, [7])
    assert last >= 6
    assert ps.Engine.restore(tmp_path).global_step <= last < engine.global_step


def test_a_delta_file_continues_after_a_run_with_steps_of_another_thread(tmp_path):
    log = [batch(NEVER_STALE + n, rows=400) for n in range(12)]
    engine, over = engine_of(num_required=1), threading.Event()
    saving = {"checkpoint": tmp_path / "run", "deltas": tmp_path / "deltas.arrows"}

    def steps():
        while not over.is_set():
            step(engine, range(200))
            time.sleep(0.0002)
        return "over"

    stepped = in_thread(steps)
    try:
        engine.run(iter(log[:6]), **saving)
    finally:
        over.set()
    assert stepped() == "over"
    restored = ps.Engine.restore(tmp_path / "run")
    assert restored.run(iter(log), resume=True, **saving).skipped == 6
