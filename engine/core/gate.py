"""The gate: counts contributions, keeps the global step, and says which contributions are stale and when it is due.

Source: TensorFlow's conditional_accumulator_base.{h,cc}. The gate never sees a gradient: the sums lie in a store, which
callers change through ``change`` and ``set_state``, under its lock, so that counts and sums always agree. The rule and
its counters are ``pyx.gate_counts``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from weakref import WeakSet

import penstock.base.forks as forks
from penstock.base.errors import StateError, UsageError
from penstock.base.validation import whole
from penstock.model.frames import Contributor, count_by, largest_counts
from penstock.model.stats import Stale
from penstock.pyx.gate_counts import GateCounts
from penstock.pyx.locked_calls import call_under

T = TypeVar("T")

# A fork waits so long for the changes of other threads: a child gets their locks, and none of the threads.
FORK_WAIT_S = 5.0
_gates: WeakSet[Gate] = WeakSet()
_forking = threading.local()  # gates: during a fork of this thread, whether each is still


class Gate(GateCounts):
    """Opens when enough has arrived since it last opened.

    num_required : contributions that make it due; None: takers in a queue decide (``TakerGate``)
    global_step : openings so far, or the value of the last ``set_global_step``
    counted : noun for the contributions, in messages
    clock : seconds, used only by ``explain``

    num_accumulated : contributions admitted since the last opening
    steps : the global steps at which it can open
    process : that created it; is_torn : this process was forked from that one in the middle of a change

    Thread-safe.
    """

    def __init__(
        self,
        num_required: int | None = None,
        global_step: int = 0,
        *,
        counted: str = "frames",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(num_required, global_step)
        self._counted = counted
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: a schedule runs under it and may read the gate
        self._is_changing = False
        self._contributors: Counter[Contributor] = Counter()
        self._stale = Stale()
        self._last_stale = 0.0
        self.process = forks.this_process
        self.is_torn = False
        _gates.add(self)

    def change(self, work: Callable[..., T], *arguments: Any, opens: bool = True) -> T:
        """Call ``work(*arguments)`` under the lock. CancelledError: it is a ``TakerGate`` that was closed.

        opens : whether a ``TakerGate`` refuses it once it is closed

        Nothing else changes the gate meanwhile; the work does so by the methods that begin with ``count``. No context
        manager: Ctrl-C at its entry or exit would leave the lock held or the gate changing.
        """
        result: T = call_under(self._lock, self._changed, work, arguments)
        return result

    def count_stale(self, local_step: int | None, contributor: Contributor) -> None:
        """Count a contribution as stale."""
        assert local_step is not None
        self._stale.count(contributor, local_step, self.global_step)
        self._last_stale = self._clock()

    def count_contribution(self, contributor: Contributor) -> None:
        """Count one more contribution as admitted."""
        self.num_accumulated += 1
        count_by(self._contributors, contributor)

    def count_native(self, num: int, num_openings: int) -> None:
        """Count contributions without a name, and openings, that native code has counted in ``GateCounts``."""
        if num_openings:
            self._contributors.clear()
        for _ in range(min(num, self.num_accumulated)):
            count_by(self._contributors, None)

    def count_opening(self) -> None:
        """Count an opening, which has taken all contributions."""
        self.num_accumulated = 0
        self.global_step += 1
        self._contributors.clear()

    def set_global_step(self, global_step: int) -> None:
        """Set the step to any int64, also a smaller one. Keeps contributions, as in TensorFlow."""
        step = whole("global_step", global_step)
        self.change(lambda: setattr(self, "global_step", step), opens=False)

    def check_may_open(self) -> None:
        """Raise StateError if the global step is none of ``steps``."""
        if not self.can_open():
            raise StateError(
                f"the global step is {self.global_step}, and the gate opens only from {self.steps[0]} to "
                f"{self.steps[-1]}; set_global_step to one of these"
            )

    def still(self) -> AbstractContextManager[Any]:
        """Return a context manager during which nothing is admitted and the gate does not open."""
        return self._lock

    @property
    def stale(self) -> Stale:
        """A copy of the counts of stale contributions, by contributor and by steps behind."""
        with self._lock:
            return self._stale.copy()

    def contributed(self) -> dict[str, int]:
        """Return the contributions since the gate last opened, by the name of their contributor."""
        with self._lock:
            return {str(who): count for who, count in self._contributors.items() if who is not None}

    def explain(self) -> str:
        """Return one line: contributions and how many are required, step, stale contributions."""
        with self._lock:
            required = self._required()
            text = f"{self.num_accumulated}{f' of {required}' if required else ''} {self._counted} in"
            text += f" ({largest_counts(self._contributors)})" if self._contributors else ""
            text += f"; global step {self.global_step}{self._waiting()}"
            if self._stale.last is not None:
                ago_s = self._clock() - self._last_stale
                text += f"; {self._stale.total} stale, the last {ago_s:.1f} s ago: {self._stale.last}"
            return text

    def _required(self) -> int | None:
        return self.num_required

    def _waiting(self) -> str:
        """Return what else waits for an opening, for ``explain``."""
        return ""

    def get_state(self) -> dict[str, Any]:
        """Return counts and step as plain data."""
        with self._lock:
            return {
                "global_step": self.global_step,
                "num_accumulated": self.num_accumulated,
                "contributors": [[who, n] for who, n in self._contributors.items()],
                "stale": self._stale.get_state(),
            }

    def set_state(self, state: Mapping[str, Any], put: Callable[[], object] = lambda: None) -> None:
        """Restore the state that ``get_state`` returned and the store's (``put``)."""
        try:
            step, num = whole("global_step", state["global_step"]), whole("num_accumulated", state["num_accumulated"])
            contributors = Counter({who: int(n) for who, n in state["contributors"]})
            stale = Stale.from_state(state["stale"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the state of a gate: {type(error).__name__}: {error}") from None

        def change() -> None:
            put()
            self.global_step, self.num_accumulated = step, num
            self._contributors, self._stale = contributors, stale

        self.change(change, opens=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.explain()})"

    def _changed(self, change: Callable[..., T], arguments: Sequence[Any]) -> T:
        if self._is_changing:
            raise UsageError("the gate cannot be changed by what runs inside it (a schedule, a produce)")
        try:
            self._is_changing = True
            return change(*arguments)
        finally:
            self._is_changing = False


def _before_fork() -> None:
    until_s, _forking.gates = time.monotonic() + FORK_WAIT_S, []
    for gate in list(_gates):
        is_still = gate._lock.acquire(timeout=max(0.0, until_s - time.monotonic()))
        _forking.gates.append((gate, is_still))


def _after_fork_in_parent() -> None:
    for gate, is_still in _forking.gates:
        if is_still:
            gate._lock.release()
    del _forking.gates


def _after_fork_in_child() -> None:
    for gate, is_still in _forking.gates:
        gate._lock, gate.is_torn = threading.RLock(), not is_still


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
