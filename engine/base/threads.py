"""A thread pool that includes the calling thread."""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from penstock.base.control_groups import cpu_quota
from penstock.base.validation import whole

Task = Callable[[], bool]


def num_threads(threads: int | None) -> int:
    """Return the number of threads; None: the CPUs that this process may use, by affinity and quota. Raises UsageError.

    A part of a CPU counts as a whole one.
    """
    if threads is not None:
        return whole("threads", threads, 1)
    quota = cpu_quota()
    return num_cpus() if quota is None else min(num_cpus(), math.ceil(quota))


def num_cpus() -> int:
    """Return the number of CPUs that this process may run on, whatever its quota of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadTeam:
    """Runs tasks on several threads. Only native code that releases the GIL runs in parallel.

    No ThreadPoolExecutor: an interrupt in its ``submit`` can leave its lock held. A SimpleQueue has none in Python.
    """

    def __init__(self, threads: int | None) -> None:
        self.threads = num_threads(threads)
        self._runs: SimpleQueue[_Run | None] = SimpleQueue()
        self._helpers: list[Thread] = []
        self._end = weakref.finalize(self, _stop, self._runs, self.threads - 1)
        # Started now: one that starts during a frame may find no memory for its stack.
        for number in range(1, self.threads):
            self._helpers.append(Thread(target=_help, args=(self._runs,), name=f"penstock_{number}", daemon=True))
            self._helpers[-1].start()

    def run(self, tasks: Iterable[Task]) -> bool:
        """Run all tasks, started in the given order, and return whether all returned True.

        Raises the error of a task, or an interrupt, once no thread works on a task any more.
        """
        run = _Run(tasks)
        try:
            try:
                with suppress(MemoryError):  # this thread does the rest
                    for _ in range(min(self.threads, len(run.left)) - 1):
                        self._runs.put(run)
                run.work()
            finally:
                run.end()
        except BaseException:
            run.end()  # an interrupt may have come before the other call began
            raise
        if run.errors:
            raise run.errors[0]
        return all(run.results)

    def close(self) -> None:
        """End the threads; ``run`` then does all tasks on the caller's."""
        self._end()
        for helper in self._helpers:
            helper.join()


def _stop(runs: SimpleQueue[_Run | None], num_helpers: int) -> None:
    for _ in range(num_helpers):
        runs.put(None)


def _help(runs: SimpleQueue[_Run | None]) -> None:
    while (run := runs.get()) is not None:
        run.help()
        del run  # its tasks may refer to the team, which ends with its last reference


class _Run:
    """The tasks of one call of ``ThreadTeam.run``.

    left : tasks that no thread has begun; results, errors : of those that have ended
    Lists instead of counters and locks: an append cannot be interrupted half way.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.left = deque(tasks)
        self.results: list[bool] = []
        self.errors: list[BaseException] = []
        self._began: list[None] = []
        self._ended: list[None] = []
        self._wake: SimpleQueue[None] = SimpleQueue()

    def work(self) -> None:
        """Run tasks until none is left."""
        while True:
            try:
                task = self.left.popleft()
            except IndexError:
                return
            self.results.append(task())

    def help(self) -> None:
        """Run tasks, on another thread than the caller's. One that begins after ``end`` finds no task."""
        self._began.append(None)
        try:
            self.work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._ended.append(None)
            self._wake.put(None)

    def end(self) -> None:
        """Wait until no helper works on a task, also through interrupts, of which the last is raised afterwards."""
        interrupt: BaseException | None = None
        self.left.clear()
        while len(self._ended) < len(self._began):
            try:
                self._wake.get(timeout=0.1)
            except Empty:
                pass
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
