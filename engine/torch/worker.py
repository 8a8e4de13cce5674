"""A thread for calls that may never return, and a limit on how long their caller waits. It knows no store.

A call of gRPC to a stopped process cannot be ended from outside. So it runs on a daemon thread, and only its caller's
wait ends: with an error that says what the work was waiting for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.errors import ServiceTimeoutError
from penstock.events import report

T = TypeVar("T")

# How often a wait is logged.
LOG_EVERY_S = 60.0

_thread = threading.local()


class Work(Future[T]):
    """One call on a worker. purpose : what it waits for now; is_abandoned : whether its caller waits no more"""

    def __init__(self, purpose: str) -> None:
        super().__init__()
        self.purpose, self.is_abandoned = purpose, False

    def outcome(self, address: str, limit_s: float) -> T:
        """Wait for the result, and log that each minute. Raises ServiceTimeoutError after the limit."""
        begin_s = time.monotonic()
        try:
            while not wait_for([self], min(LOG_EVERY_S, begin_s + limit_s - time.monotonic())).done:
                waited_s = time.monotonic() - begin_s
                if waited_s >= limit_s:
                    raise ServiceTimeoutError(f"{address}: waited {limit_s:g} s (timeout_s) for {self.purpose}")
                report(logging.WARNING, "waiting", service=address, seconds=round(waited_s), waits_for=self.purpose)
        except BaseException:
            self.is_abandoned = True
            raise
        return self.result()


def waits_for(purpose: str | None = None) -> None:
    """Record what the work of this thread waits for from now on; None: as before.

    Raises CancelledError if its caller waits no more.
    """
    work: Work[Any] | None = getattr(_thread, "work", None)
    if work is not None:
        if work.is_abandoned:
            raise CancelledError
        work.purpose = work.purpose if purpose is None else purpose


class Worker:
    """Runs calls in their order on a daemon thread, which starts with the first one, also in a forked process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[Work[Any], Callable[[], Any]] | None] = SimpleQueue()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs on this worker."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], T], purpose: str) -> Work[T]:
        if self._thread is None or not self._thread.is_alive():
            self._queue = SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        work: Work[T] = Work(purpose)
        self._queue.put((work, call))
        return work

    def close(self) -> None:
        """Wait for the call that runs, cancel the others, and end the thread."""
        if self._thread is not None and self._thread.is_alive():
            while not self._queue.empty():
                if (item := self._queue.get()) is not None:
                    item[0].cancel()
            self._queue.put(None)
            self._thread.join()

    @staticmethod
    def _run(queue: SimpleQueue[tuple[Work[Any], Callable[[], Any]] | None]) -> None:
        while (item := queue.get()) is not None:
            work, call = item
            if not work.set_running_or_notify_cancel():
                continue
            _thread.work = work
            try:
                work.set_result(call())
            except BaseException as error:
                work.set_exception(error)
            del item, work, call, _thread.work
