"""EngineCore and its observers; the options of a run, stated once."""

import gc

import numpy as np
import pytest
from engines import engine_of, frame, zeroed

import penstock as ps
from penstock.core.observers import ALL_UNSEEN, EVERY_STEP, StepObserver


def apply(engine, ids, local_step=None):
    return engine.apply({"t": frame(ids)}, local_step=local_step)


class Recorder(StepObserver):
    """Appends (name, event, details) to a list that several observers share."""

    def __init__(self, name, events, core):
        self.name, self.events, self.core = name, events, core

    def note(self, event, *details):
        self.events.append((self.name, event, *details))

    def pushed(self, pushed):
        rows = self.core.tables.lookup("t", np.array([1]), False).tolist() if pushed.seconds else []
        self.note("pushed", pushed.num_rows, pushed.is_stale, rows)

    def before_step(self, coalesced):
        self.note("before_step", self.core.tables.lookup("t", np.array([1]), False).tolist())

    def core_failed(self, error):
        self.note("core_failed", str(error))

    def before_load(self):
        self.note("before_load")

    def loaded(self, name, ids):
        self.note("loaded", name, None if ids is None else ids.tolist())


@pytest.fixture
def recorded():
    engine, events = zeroed(engine_of()), []
    observers = [Recorder(name, events, engine.core) for name in ("inner", "outer")]
    for observer in observers:
        engine.core.observe(observer)
    engine.observers = observers  # the core does not keep them alive
    return engine, events


def test_the_last_observer_is_the_outermost(recorded):
    engine, events = recorded
    assert apply(engine, [1])
    assert events == [
        ("outer", "before_step", [[0.0, 0.0]]),
        ("inner", "before_step", [[0.0, 0.0]]),
        ("inner", "pushed", 1, False, [[-1.0, -1.0]]),
        ("outer", "pushed", 1, False, [[-1.0, -1.0]]),
    ]


def test_observers_see_stale_frames_and_loads(recorded, tmp_path):
    engine, events = recorded
    engine.gate.set_global_step(5)
    assert not apply(engine, [1, 2], local_step=4)
    engine.load_parameters("t", np.ones((1, 2)), ids=[3])
    engine.write_tables(tmp_path)
    engine.read_tables(tmp_path)
    assert [event[1:] for event in events if event[0] == "inner"] == [
        ("pushed", 2, True, []),
        ("before_load",),
        ("loaded", "t", [3]),
        ("before_load",),
        ("loaded", "t", None),
    ]


def test_observers_learn_of_a_step_that_fails(recorded, monkeypatch):
    engine, events = recorded

    def lost(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.core.tables, "apply", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        apply(engine, [1])
    assert [event[:2] for event in events] == [
        ("outer", "before_step"),
        ("inner", "before_step"),
        ("inner", "core_failed"),
        ("outer", "core_failed"),
    ]
    assert engine.core.failure.reason == "RuntimeError: device lost"
    with pytest.raises(ps.StateError, match="an earlier step failed half way"):
        engine.lookup("t", [1])


class Failing(StepObserver):
    """Raises an error after every frame. limit : of the steps that it does not see begin"""

    def __init__(self, limit):
        self.limit = lambda: limit

    def pushed(self, pushed):
        raise RuntimeError("no memory")


@pytest.mark.parametrize("limit", [ALL_UNSEEN, EVERY_STEP])  # in native code, or not
def test_an_error_of_an_observer_fails_the_engine_once_a_frame_has_entered(limit):
    engine, observer = zeroed(engine_of()), Failing(limit)
    engine.gate.set_global_step(5)
    engine.core.observe(observer)
    with pytest.raises(RuntimeError, match="no memory"):
        apply(engine, [1], local_step=4)  # stale: nothing of it enters
    assert engine.core.failure.reason is None
    with pytest.raises(RuntimeError, match="no memory"):
        apply(engine, [1])
    assert engine.core.failure.reason == "RuntimeError: no memory"
    with pytest.raises(ps.StateError, match="an earlier step failed half way"):
        engine.apply({"t": frame([1])}, local_step=4, contributor="a")  # a stale frame, too


def test_an_observer_ends_with_its_last_reference():
    engine, events = zeroed(engine_of()), []
    observer = Recorder("weak", events, engine.core)
    engine.core.observe(observer)
    apply(engine, [1])
    assert len(events) == 2
    del observer
    gc.collect()
    apply(engine, [1])
    assert len(events) == 2
