"""How far the host may be ahead of a device, what waits for whom, and what comes out when a device fails."""

import sys
import threading
import time
from itertools import count

import jax
import numpy as np
import pytest
from device_table import TEAM, device_table
from engines import engine_of, frame
from limits import HANG_S, in_thread

import penstock as ps
from penstock.model.updates import UpdateRule
from penstock.rows.bridge.dispatcher import AHEAD, RING, Arena, Dispatch, Dispatcher
from penstock.rows.bridge.sharding import Layout


class Fence:
    """Stands for an output of a program."""

    def __init__(self, error=None):
        self.done, self.error, self.waited = threading.Event(), error, False

    def block_until_ready(self):
        self.waited = True
        assert self.done.wait(HANG_S)
        if self.error is not None:
            raise self.error


def table_of(mesh_of, rows=3000, dim=8, devices=1, rule=None, **options):
    rule = rule or UpdateRule("adagrad", 1)
    layout = Layout("t", rows, dim, rule.num_slots, devices, False)
    return device_table(mesh_of(devices), layout, rule, variant="xla", **options)


def test_an_arena_is_used_again_only_behind_its_fence():
    arena, fence = Arena(), Fence()
    arena.begin()
    arena.read_by("table 't', step 1", fence)
    began = threading.Event()
    waiting = threading.Thread(target=lambda: (arena.begin(), began.set()))
    waiting.start()
    assert not began.wait(0.05)
    fence.done.set()
    assert began.wait(HANG_S)
    waiting.join()


def test_the_caller_is_ahead_by_so_many_steps_and_then_waits():
    dispatcher, hold, done = Dispatcher(TEAM), threading.Event(), []

    def work(step):
        assert hold.wait(HANG_S)
        done.append(step)

    for step in range(AHEAD):
        dispatcher.submit(f"step {step}", lambda step=step: work(step))
    one_more = threading.Thread(target=dispatcher.submit, args=("step", lambda: work(AHEAD)))
    one_more.start()
    one_more.join(0.05)
    assert one_more.is_alive()  # back-pressure
    hold.set()
    one_more.join(HANG_S)
    dispatcher.wait()
    assert done == list(range(AHEAD + 1))


def test_no_more_arenas_than_the_ring_has_are_alive():
    dispatcher, fences = Dispatcher(TEAM), []
    arenas = []
    for _ in range(2 * RING):
        arena = dispatcher.arena()
        arenas.append(arena)
        fences.append(Fence())
        fences[-1].done.set()
        arena.read_by("table 't', step 0", fences[-1])
    assert len(set(map(id, arenas))) == RING
    assert [fence.waited for fence in fences] == [True] * RING + [False] * RING


def test_an_error_behind_a_fence_names_table_and_step():
    dispatcher, fence = Dispatcher(TEAM), Fence(jax.errors.JaxRuntimeError("INTERNAL: parity"))
    fence.done.set()
    dispatcher.arena().read_by("table 'item', step 3", fence)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^table 'item', step 3: INTERNAL: parity"):
        dispatcher.wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match="table 'item', step 3"):
        dispatcher.drain()


@pytest.mark.parametrize("devices", [1, 3])
def test_a_copy_of_rows_is_queued_between_steps_and_waits_for_none(mesh_of, devices):
    table, busy = table_of(mesh_of, devices=devices), threading.Event()
    ids, gradients = np.arange(80), np.ones((80, 8), np.float32)
    table.apply(ids, gradients, 0.1)
    table.wait()
    table.backend._dispatcher.submit("table 't', step 1", lambda: busy.wait(HANG_S))
    before = np.empty((80, 16), np.float32)
    wait = table.copy_rows(ids, before)  # returns although nothing is dispatched
    assert not busy.is_set()
    busy.set()
    table.apply(ids, gradients, 0.1)
    wait()
    assert (before[:, 8:] == 1.5).all()
    assert (table.read(ids, 1) == 2.5).all()


def test_a_copy_that_fails_names_its_table_and_stops_what_follows(mesh_of, monkeypatch):
    table = table_of(mesh_of)

    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(table.backend.programs, "at", lambda *_: fail)
    wait = table.copy_rows(np.arange(3), np.empty((3, 16), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="table 't', copying rows: INTERNAL: the device is gone"):
        wait()
    with pytest.raises(jax.errors.JaxRuntimeError, match="table 't', copying rows: INTERNAL"):
        table.wait()


# Where the caller's code waits or queues work; those of the library held locks in Python, which an interrupt left held.
QUEUES = ("dispatcher.py", "threading.py", "concurrent/futures/thread.py", "concurrent/futures/_base.py")


def is_interrupted(work, opcode):
    """Run work, with Ctrl-C before an opcode in QUEUES, counted from 1; False if there are fewer."""
    left = opcode

    def trace(code, event, _):
        nonlocal left
        if not code.f_code.co_filename.endswith(QUEUES):
            return None
        code.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # before settrace: else Python 3.12 has no events for opcodes
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_opcode_of_a_caller_leaves_the_dispatcher_usable():
    for opcode in count(1):
        dispatcher, done = Dispatcher(TEAM), []

        def several(dispatcher=dispatcher, done=done):
            for step in range(AHEAD + 2):
                dispatcher.submit(f"step {step}", lambda step=step: done.append(step))
            dispatcher.drain()

        was_interrupted = is_interrupted(several, opcode)
        assert done == [*range(len(done))]
        in_thread(several)()
        assert done[-AHEAD - 2 :] == [*range(AHEAD + 2)]
        if not was_interrupted:
            break
    assert opcode > 100


def test_an_engine_that_is_interrupted_while_it_submits_a_step_is_usable_or_failed_and_never_hangs():
    results = set()
    for opcode in count(1):
        engine = engine_of(variant="xla")
        was_interrupted = is_interrupted(lambda engine=engine: engine.apply({"t": frame([3])}), opcode)
        try:
            in_thread(lambda engine=engine: engine.lookup("t", [3]))()
        except ps.StateError as error:
            results.add(str(error))
        if not was_interrupted:
            break
    assert opcode > 20
    problem = "an earlier step failed half way (KeyboardInterrupt: ); make a new engine from saved tables"
    assert results == {problem}


@pytest.mark.evidence
def test_two_threads_that_wait_for_one_dispatch_return_also_if_they_notice_its_end_late():
    """A step and a commit may wait for the same copy of rows.

    One thread keeps the interpreter from both for longer than they wait at a time, at about the moment of its end. A
    queue with a timeout let one of them wait for ever.
    """

    def keep_interpreter(is_over):
        while not is_over.is_set():
            end_s = time.perf_counter() + 0.15
            while time.perf_counter() < end_s:
                pass
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.3)
    try:
        for _ in range(60):
            dispatch, is_over = Dispatch(lambda: None), threading.Event()
            waiting = [threading.Thread(target=dispatch.wait, daemon=True) for _ in range(2)]
            keeping = threading.Thread(target=keep_interpreter, args=(is_over,), daemon=True)
            for thread in waiting:
                thread.start()
            time.sleep(0.09)
            keeping.start()
            dispatch.run()
            for thread in waiting:
                thread.join(HANG_S)
            is_over.set()
            keeping.join()
            assert not any(thread.is_alive() for thread in waiting)
    finally:
        sys.setswitchinterval(before)
