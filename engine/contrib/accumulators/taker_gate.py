"""A gate with takers, as TensorFlow's conditional accumulators have it: first come, first served.

Source: TensorFlow's conditional_accumulator_base.{h,cc}. A taker's Future completes after the gate's lock is released,
so that its callbacks may use the gate.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from penstock.base.errors import CancelledError, UsageError
from penstock.core.gate import Gate
from penstock.model.frames import Contributor

T = TypeVar("T")


class _Ticket(NamedTuple):
    """A taker in the queue. since : when it was queued, in seconds of the gate's clock"""

    num_required: int
    produce: Callable[[int], Any]
    since: float


class TakerGate(Gate):
    """Opens for the taker whose turn it is, once as much has arrived as it requires."""

    def __init__(
        self, global_step: int = 0, *, counted: str = "gradients", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(None, global_step, counted=counted, clock=clock)
        self._queue: OrderedDict[Future[Any], _Ticket] = OrderedDict()
        self._completions: list[Callable[[], object]] = []  # of Futures that the current change has served
        self._closed = False

    def admit(self, local_step: int | None, add: Callable[[], None], contributor: Contributor = None) -> bool:
        """Admit a contribution: call ``add()``, count it, serve the takers that it allows, and return True.

        Count a stale one as such, and return False. If ``add`` raises, nothing is counted. Raises CancelledError if the
        gate is closed.
        """
        return self.change(self._admit, local_step, add, contributor)

    def _admit(self, local_step: int | None, add: Callable[[], None], contributor: Contributor) -> bool:
        if self.is_stale(local_step):
            self.count_stale(local_step, contributor)
            return False
        add()
        self.count_contribution(contributor)
        return True

    def take(self, num_required: int, produce: Callable[[int], T]) -> Future[T]:
        """Queue for the next opening with at least num_required contributions.

        produce : called with num_accumulated at that opening; returns the Future's result. If it raises, the Future
            raises the same error and the gate has not opened (TensorFlow counts the step first).
        Cancelling the Future leaves the queue at once and consumes nothing. Raises UsageError, or CancelledError if the
        gate is closed.
        """
        if num_required < 1:
            raise UsageError(f"num_required: expected at least 1, got {num_required}")
        future: Future[T] = Future()

        def change() -> None:
            self._queue[future] = _Ticket(num_required, produce, self._clock())
            future.add_done_callback(self._leave)

        self.change(change)
        return future

    def close(self) -> None:
        """Cancel every queued taker; from now on admit and take raise CancelledError. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = list(self._queue)
            self._queue.clear()  # all at once, so that cancelling one taker does not serve the next
        for future in waiting:
            if future.cancel():
                future.set_running_or_notify_cancel()

    def _required(self) -> int | None:
        return next((ticket.num_required for ticket in self._queue.values()), None)

    def _waiting(self) -> str:
        head = next(iter(self._queue.values()), None)
        if head is None:
            return "; no taker is waiting"
        return f"; {len(self._queue)} waiting to take, the first for {self._clock() - head.since:.1f} s"

    def explain(self) -> str:
        """Return what ``Gate.explain`` does, and the queued takers."""
        with self._lock:
            return super().explain() + ("; closed" if self._closed else "")

    def change(self, work: Callable[..., T], *arguments: Any, opens: bool = True) -> T:
        """Run a change under the lock, serve the takers that it allows, and complete their Futures after the release.

        opens : whether a closed gate refuses it
        """
        completions: list[Callable[[], object]] = []

        def served() -> T:
            if opens and self._closed:
                raise CancelledError(f"closed: {self.explain()}")
            self._completions = completions
            result = work(*arguments)
            self._serve()
            return result

        try:
            return super().change(served, opens=opens)
        finally:
            for complete in completions:
                complete()

    def _serve(self) -> None:
        while self._queue and not self._closed:
            future, ticket = next(iter(self._queue.items()))
            if not future.cancelled() and self.num_accumulated < ticket.num_required:
                return  # first come, first served
            del self._queue[future]
            if future.set_running_or_notify_cancel():
                self._give(future, ticket)

    def _give(self, future: Future[Any], ticket: _Ticket) -> None:
        try:
            self.check_may_open()
            result = ticket.produce(self.num_accumulated)
        except Exception as error:
            self._completions.append(partial(future.set_exception, error))
        except BaseException:  # Ctrl-C is for this thread; the taker may be in another
            self._completions.append(partial(future.set_exception, CancelledError("interrupted while it was served")))
            raise
        else:
            self.count_opening()
            self._completions.append(partial(future.set_result, result))

    def _leave(self, future: Future[Any]) -> None:
        """Remove a cancelled Future from the queue, which may allow the next taker to be served."""
        if future.cancelled():
            with self._lock:
                if self._is_changing:
                    return  # cancelled from inside a change, which serves the queue when it ends

            def change() -> None:
                if self._queue.pop(future, None) is not None:
                    future.set_running_or_notify_cancel()

            self.change(change, opens=False)
