"""Any interleaving of what may be done to an accumulator: against a model in plain Python, and from many threads."""

import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from evidence import IS_EVIDENCE, more_as_evidence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from limits import HANG_S

import penstock as ps


class Model:
    """The sparse accumulator as the facts describe it, one thread, exact numbers."""

    def __init__(self, mean):
        self.mean, self.step, self.num, self.rows, self.counts = mean, 0, 0, {}, {}
        self.queue, self.results, self.closed = [], {}, False
        self.stale = Counter()

    def apply(self, ids, values, local_step):
        if self.closed:
            return "closed"
        if local_step < self.step:
            self.stale[self.step - local_step] += 1
            return False
        if any(i >= 8 for i in ids):
            return "refused"
        for i, value in zip(ids, values, strict=True):
            self.rows[i] = self.rows.get(i, 0) + value
        for i in set(ids):
            self.counts[i] = self.counts.get(i, 0) + 1
        self.num += 1
        self.serve()
        return True

    def take(self, taker, num_required):
        if self.closed:
            return "closed"
        self.queue.append((taker, num_required))
        self.serve()
        return "queued"

    def serve(self):
        while self.queue and self.num >= self.queue[0][1]:
            taker, _ = self.queue.pop(0)
            ids = sorted(self.rows)
            divisors = [self.counts[i] if self.mean else 1 for i in ids]
            self.results[taker] = ids, [self.rows[i] / by for i, by in zip(ids, divisors, strict=True)]
            self.num, self.rows, self.counts, self.step = 0, {}, {}, self.step + 1

    def cancel(self, taker):
        if taker not in self.results:
            self.results[taker] = "cancelled"
            self.queue = [item for item in self.queue if item[0] != taker]
            self.serve()

    def close(self):
        for taker, _ in self.queue:
            self.results[taker] = "cancelled"
        self.queue, self.closed = [], True

    def get_state(self):
        return self.step, self.num, dict(self.rows), dict(self.counts), self.stale.copy()

    def set_state(self, state):
        self.step, self.num, rows, counts, stale = state
        self.rows, self.counts, self.stale = dict(rows), dict(counts), stale.copy()
        self.serve()


def outcome(call):
    try:
        return call()
    except ps.CancelledError:
        return "closed"
    except ps.InputError:
        return "refused"


class Interleaved(RuleBasedStateMachine):
    takers = Bundle("takers")
    states = Bundle("states")

    @initialize(mean=st.booleans(), dtype=st.sampled_from(["float32", "float64"]))
    def start(self, mean, dtype):
        self.dtype = dtype
        self.acc = ps.SparseConditionalAccumulator(dtype, (8, 1), "MEAN" if mean else "SUM")
        self.model, self.futures = Model(mean), {}

    @rule(ids=st.lists(st.integers(0, 8), max_size=4), value=st.integers(-9, 9), late=st.integers(-2, 2))
    def apply(self, ids, value, late):
        values = [value + n for n in range(len(ids))]
        step = self.model.step - late
        column = np.array(values, self.dtype).reshape(-1, 1)
        got = outcome(lambda: self.acc.apply_gradient(ids, column, step))
        assert got == self.model.apply(ids, values, step)

    @rule(target=takers, num_required=st.integers(1, 4))
    def take(self, num_required):
        taker = len(self.futures)
        future = outcome(lambda: self.acc.take_gradient_async(num_required))
        if self.model.take(taker, num_required) == "closed":
            assert future == "closed"
            return None
        self.futures[taker] = future
        return taker

    @rule(taker=takers)
    def cancel(self, taker):
        if taker is not None:
            self.futures[taker].cancel()
            self.model.cancel(taker)

    @rule(step=st.integers(-3, 9))
    def set_step(self, step):
        self.acc.set_global_step(step)
        self.model.step = step

    @rule(target=states)
    def get_state(self):
        return self.acc.get_state(), self.model.get_state()

    @rule(state=states)
    def set_state(self, state):
        outcome(lambda: self.acc.set_state(state[0]))
        self.model.set_state(state[1])

    @rule(chance=st.integers(0, 4))
    def close(self, chance):
        if chance == 0:  # rarely: nothing much happens afterwards
            self.acc.close()
            self.model.close()

    @invariant()
    def they_agree(self):
        assert (self.acc.num_accumulated(), self.acc.global_step) == (self.model.num, self.model.step)
        assert self.acc.stale.by_lateness == self.model.stale
        for taker, future in self.futures.items():
            assert future.done() == (taker in self.model.results)
            if future.done():
                got = "cancelled" if future.cancelled() else future.result(0)
                wanted = self.model.results[taker]
                if "cancelled" in (got, wanted):
                    assert got == wanted
                else:
                    quotients = np.array(wanted[1], np.dtype(self.dtype).type).tolist()
                    assert (got.indices.tolist(), got.values[:, 0].tolist()) == (wanted[0], quotients)


Interleaved.TestCase.settings = settings(max_examples=200 if IS_EVIDENCE else 80, stateful_step_count=40)
test_every_interleaving_is_the_models = more_as_evidence(Interleaved.TestCase)


class Sums(Counter):
    """id → exact sum."""

    def add(self, ids, values):
        for i, value in zip(np.asarray(ids).tolist(), np.asarray(values)[:, 0].tolist(), strict=True):
            self[i] += value


@pytest.fixture
def _switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching_often")
@pytest.mark.parametrize("tf_compat", [False, True])
def test_eight_producers_and_four_takers_lose_and_duplicate_nothing(tf_compat):
    acc = ps.SparseConditionalAccumulator("float32", (50, 3), "SUM", tf_compat=tf_compat)
    sent, dropped, taken = ([Sums() for _ in range(8)] for _ in range(3))
    num_takes, num_dropped, failures = [0] * 4, [0] * 8, []
    frames = 200 if tf_compat else 600

    def produce(number):
        rng = np.random.default_rng(number)
        for _ in range(frames):
            ids = np.unique(rng.integers(0, 50, rng.integers(0, 40)))
            values = np.repeat(rng.integers(-99, 99, (len(ids), 1)), 3, 1).astype(np.float32)
            step = acc.global_step - int(rng.integers(0, 4) == 0)
            sent[number].add(ids, values)
            if not acc.apply_gradient(ids, values, step, contributor=number):
                dropped[number].add(ids, values)
                num_dropped[number] += 1

    def take(number):
        choose = random.Random(number)
        while True:
            try:
                gradient = acc.take_gradient(choose.randint(1, 5), timeout=choose.choice([None, 0, 0.001, 1]))
            except ps.TakeTimeoutError:
                continue
            except ps.CancelledError:
                return
            num_takes[number] += 1
            taken[number].add(gradient.indices, gradient.values)

    def guarded(work, number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)
            acc.close()

    threads = [threading.Thread(target=guarded, args=(produce, number), daemon=True) for number in range(8)]
    takers = [threading.Thread(target=guarded, args=(take, number), daemon=True) for number in range(4)]
    for thread in takers + threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    acc.close()
    for thread in takers:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads + takers)
    assert failures == []
    left, held = Sums(), acc.get_state()["held"]
    if held:
        left.add(held["ids"], held["values"])
    actual = left
    for part in dropped + taken:
        actual.update(part)
    everything = Sums()
    for part in sent:
        everything.update(part)
    assert actual == everything
    assert acc.global_step == sum(num_takes) > 0
    assert acc.stale.total == sum(num_dropped)
    assert acc.stale.by_contributor == {n: num for n, num in enumerate(num_dropped) if num}
