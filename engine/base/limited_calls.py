"""Threads for calls that may never return, and a limit on how long their caller waits. It knows no store.

A call of gRPC to a stopped process cannot be ended from outside. So it runs on a daemon thread, and only its caller's
wait ends, with an error that says what the call was waiting for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import penstock.base.interrupts as interrupts
from penstock.base.errors import ServiceTimeoutError
from penstock.base.events import report

T = TypeVar("T")

# How often a wait is logged, and how often it looks whether a signal has arrived.
LOG_EVERY_S, _LOOK_S = 60.0, 0.5

_thread = threading.local()


class LimitedCall(Future[T]):
    """A call on another thread. purpose : what it waits for now; is_abandoned : whether its caller waits no more"""

    def __init__(self, purpose: str) -> None:
        super().__init__()
        self.purpose, self.is_abandoned = purpose, False

    def outcome(self, address: str, limit_s: float) -> T:
        """Wait for the result, and log that each minute. Raises ServiceTimeoutError after the limit."""
        begin_s = said_s = time.monotonic()
        try:
            while True:
                try:
                    return self.result(max(0.0, min(_LOOK_S, begin_s + limit_s - time.monotonic())))
                except TimeoutError:
                    if self.done():  # the call's own error
                        return self.result()
                interrupts.check()
                now_s = time.monotonic()
                if now_s - begin_s >= limit_s:
                    raise ServiceTimeoutError(f"{address}: waited {limit_s:g} s (timeout_s) for {self.purpose}")
                if now_s - said_s >= LOG_EVERY_S:
                    said_s = now_s
                    report("waiting", service=address, seconds=round(now_s - begin_s), waits_for=self.purpose)
        except BaseException:
            self.is_abandoned = True
            raise

    def run(self, function: Callable[[], T]) -> None:
        """Run the call on this thread, unless it is cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        _thread.call = self
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)
        del _thread.call


def in_call() -> bool:
    """Return whether this thread runs a call, so that a limit applies to whatever it waits for."""
    return getattr(_thread, "call", None) is not None


def waits_for(purpose: str) -> None:
    """Record what the call that this thread runs waits for from now on."""
    if in_call():
        _thread.call.purpose = purpose


def check_awaited() -> None:
    """Raise CancelledError if the caller of the call that this thread runs has given up."""
    if in_call() and _thread.call.is_abandoned:
        raise CancelledError


def interruptible(function: Callable[[], T], purpose: str, address: str) -> T:
    """Return the result of a function. It runs on another thread, so that a signal ends the wait for it."""
    if in_call():
        return function()
    call: LimitedCall[T] = LimitedCall(purpose)
    threading.Thread(target=call.run, args=(function,), name="penstock-call", daemon=True).start()
    return call.outcome(address, math.inf)


class CallThread:
    """Runs calls in their order on a daemon thread, which starts with the first one, also in a forked process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[LimitedCall[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, function: Callable[[], T], purpose: str) -> LimitedCall[T]:
        if self._thread is None or not self._thread.is_alive():
            self._queue = SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        call: LimitedCall[T] = LimitedCall(purpose)
        self._queue.put((call, function))
        return call

    def close(self, waits: bool) -> None:
        """Cancel the calls that have not begun, and end the thread. waits : for the end of the call that runs"""
        if self._thread is not None and self._thread.is_alive():
            with suppress(Empty):
                while (item := self._queue.get_nowait()) is not None:
                    item[0].cancel()
            self._queue.put(None)
            if waits:
                self._thread.join()

    @staticmethod
    def _run(queue: SimpleQueue[tuple[LimitedCall[Any], Callable[[], Any]] | None]) -> None:
        while (item := queue.get()) is not None:
            call, function = item
            call.run(function)
            del item, call, function
