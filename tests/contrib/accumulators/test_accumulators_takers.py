"""The conditional accumulators' takers and state: explained, cancelled, closed, saved."""

import concurrent.futures
import threading

import numpy as np
import pytest
from limits import HANG_S, until

import penstock as ps
from penstock.contrib.accumulators.taker_gate import TakerGate

# ---- messages and counts


def test_a_stale_drop_is_counted_by_producer_and_by_lateness():
    acc = ps.ConditionalAccumulator()
    acc.set_global_step(1000)
    for step, who in ((999, "a"), (998, "a"), (998, 7), (900, None), (1000, "a")):
        assert acc.apply_gradient(1.0, step, who) == (step == 1000)
    assert acc.stale.total == 4
    assert acc.stale.by_contributor == {"a": 2, 7: 1, None: 1}
    assert acc.stale.by_lateness == {1: 1, 2: 2, 128: 1}  # above 64: the next power of two


def test_explain_names_the_reason_for_a_wait():
    acc = ps.ConditionalAccumulator()
    assert acc.explain() == "0 gradients in; global step 0; no taker is waiting"
    acc.apply_gradient(1.0, contributor="a")
    acc.apply_gradient(1.0, contributor="a")
    acc.apply_gradient(1.0)
    acc.apply_gradient(1.0, local_step=-2, contributor="b")
    acc.take_gradient_async(5)
    acc.take_gradient_async(1)
    explanation = acc.explain()
    assert explanation.startswith(
        "3 of 5 gradients in ('a': 2, unnamed: 1); global step 0; 2 waiting to take, the first for 0."
    )
    assert explanation.endswith("ago: step -2 from 'b' came at step 0, 2 behind")
    assert "3 of 5 gradients in" in repr(acc)


def test_a_take_that_times_out_says_why_and_consumes_nothing():
    acc = ps.ConditionalAccumulator()
    acc.apply_gradient(1.0, contributor=3)
    with pytest.raises(
        TimeoutError, match=r"nothing taken in 0.01 s: 1 of 2 gradients in \(3: 1\); .* 1 waiting"
    ) as caught:
        acc.take_gradient(2, timeout=0.01)
    assert isinstance(caught.value, ps.TakeTimeoutError)
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)
    assert acc.take_gradient(1, timeout=float("inf")) == 1.0


# ---- takers


def test_closing_wakes_every_taker_and_gradients_can_still_be_saved():
    outcomes = []

    def taker():
        try:
            acc.take_gradient(2)
        except ps.CancelledError as error:
            outcomes.append(str(error))

    with ps.ConditionalAccumulator() as acc:
        acc.apply_gradient(1.0)
        waiting = acc.take_gradient_async(9)
        threads = [threading.Thread(target=taker) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: "4 waiting" in acc.explain())
    for thread in threads:
        thread.join(HANG_S)
    assert len(outcomes) == 3
    assert all("closed while a take waited" in explanation for explanation in outcomes)
    assert waiting.cancelled()
    for call in (lambda: acc.apply_gradient(1.0), lambda: acc.take_gradient(1), lambda: acc.take_gradient_async(1)):
        with pytest.raises(concurrent.futures.CancelledError, match="closed"):
            call()
    other = ps.ConditionalAccumulator()
    other.set_state(acc.get_state())
    assert other.take_gradient(1, timeout=0) == 1.0


def test_a_callback_of_a_future_may_use_the_accumulator():
    acc = ps.ConditionalAccumulator()
    acc.take_gradient_async(1).add_done_callback(lambda done: acc.apply_gradient(done.result() * 2, local_step=1))
    acc.apply_gradient(4.0)
    assert (acc.num_accumulated(), acc.take_gradient(1, timeout=0)) == (1, 8.0)


# ---- state


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("tf_compat", [False, True])
def test_a_restored_state_continues_the_sums(dtype, tf_compat):
    rng = np.random.default_rng(5)
    make = lambda: ps.SparseConditionalAccumulator(dtype, (None, 2, 2), tf_compat=tf_compat)  # noqa: E731
    unbroken, first, second = make(), make(), make()
    for number in range(4):
        gradient = rng.integers(0, 9, 12), rng.standard_normal((12, 2, 2)).astype(dtype)
        unbroken.apply_gradient(*gradient, contributor=number)
        (first if number < 2 else second).apply_gradient(*gradient, contributor=number)
        if number == 1:
            first.apply_gradient([0], np.zeros((1, 2, 2), dtype), local_step=-1)
            second.set_state(first.get_state())
    assert second.stale == first.stale
    assert (second.num_accumulated(), "(0: 1, 1: 1, 2: 1, 3: 1)" in second.explain()) == (4, True)
    wanted, got = unbroken.take_gradient(4), second.take_gradient(4)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in wanted]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda state: state.pop("gate"),
        lambda state: state["gate"].pop("stale"),
        lambda state: state["settings"].update(dtype="float64"),
        lambda state: state["settings"].update(shape=[11, 2]),
        lambda state: state["held"].pop("counts"),
        lambda state: state["held"].update(counts=np.ones(3, np.int64)),
        lambda state: state["held"].update(values=np.ones((2, 3), np.float32)),
        lambda state: state["held"].update(ids=np.array([1, 10])),
        lambda state: state["held"].update(ids=np.array([1, 1])),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(break_it):
    acc = ps.SparseConditionalAccumulator(shape=(10, 2))
    acc.apply_gradient([1, 2], np.ones((2, 2), np.float32))
    before, state = acc.get_state(), acc.get_state()
    break_it(state)
    with pytest.raises(ps.StateError):
        acc.set_state(state)
    assert str(acc.get_state()) == str(before)


def test_a_dense_accumulator_restores_an_empty_state_and_refuses_sums_of_another_shape():
    empty = ps.ConditionalAccumulator(np.float32, shape=(2,))
    empty.set_state(empty.get_state())
    assert empty.num_accumulated() == 0
    other = ps.ConditionalAccumulator(np.float32, shape=(3,))
    other.apply_gradient(np.ones(3, np.float32))
    with pytest.raises(ps.StateError, match="shape"):
        empty.set_state(other.get_state())


# ---- the gate by itself


def test_the_gate_uses_the_clock_it_is_given():
    now = [100.0]
    gate = TakerGate(clock=lambda: now[0])
    gate.take(2, lambda num: num)
    gate.admit(-1, lambda: None, "late")
    now[0] = 103.5
    assert "1 waiting to take, the first for 3.5 s; 1 stale, the last 3.5 s ago: step -1 from 'late'" in gate.explain()


def test_the_gate_stays_closed_if_producing_fails():
    def fail(num):
        raise MemoryError(f"no room for {num}")

    gate = TakerGate()
    gate.admit(None, lambda: None)
    failing, next_one = gate.take(1, fail), gate.take(1, lambda num: num)
    with pytest.raises(MemoryError, match="no room for 1"):
        failing.result(0)
    assert (next_one.result(0), gate.global_step) == (1, 1)


def test_ctrl_c_while_a_taker_of_another_thread_is_served_reaches_both():
    def interrupted(num):
        raise KeyboardInterrupt

    gate = TakerGate()
    waiting = gate.take(1, interrupted)
    with pytest.raises(KeyboardInterrupt):
        gate.admit(None, lambda: None)
    with pytest.raises(ps.CancelledError, match="interrupted while it was served"):
        waiting.result(0)
    assert (gate.num_accumulated, gate.global_step) == (1, 0)


def test_a_gate_at_the_largest_step_does_not_open():
    gate = TakerGate(global_step=2**63 - 2)
    gate.admit(None, lambda: None)
    assert gate.take(1, lambda num: num).result(0) == 1
    gate.admit(None, lambda: None)
    waiting = gate.take(1, lambda num: num)
    with pytest.raises(
        ps.StateError, match=r"step is 9223372036854775807, and the gate opens only from .* set_global_step"
    ):
        waiting.result(0)
    assert (gate.num_accumulated, gate.global_step) == (1, 2**63 - 1)
    gate.set_global_step(7)
    assert gate.take(1, lambda num: num).result(0) == 1
    with pytest.raises(ps.StateError, match=r"not the state of a gate: .*global_step: expected an int64"):
        gate.set_state({**gate.get_state(), "global_step": 2**63})
