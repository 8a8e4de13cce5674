"""A thread pool that includes the calling thread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier

from penstock.validation import whole

Task = Callable[[], bool]


def num_threads(threads: int | None) -> int:
    """Return the number of threads; None: the CPUs that this process may use. Raises UsageError."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return whole("threads", threads, 1)


class ThreadTeam:
    """Runs tasks on several threads. Only native code that releases the GIL runs in parallel."""

    def __init__(self, threads: int | None) -> None:
        self.threads = num_threads(threads)
        self._pool = _started_pool(self.threads - 1) if self.threads > 1 else None

    def run(self, tasks: Iterable[Task]) -> bool:
        """Run all tasks, started in the given order, and return whether all returned True. Raises the error of a task
        once all have ended."""
        left = deque(tasks)
        helping: list[Future[bool]] = []
        try:
            for _ in range(min(self.threads, len(left)) - 1):
                assert self._pool is not None
                helping.append(self._pool.submit(_work, left))
            good = _work(left)
        finally:
            # Also after an error: no thread may write to the sums when this returns. One that has not begun will not.
            left.clear()
            helping = [helper for helper in helping if not helper.cancel()]
            wait(helping)
            results = [helper.result() for helper in helping]
        return good and all(results)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """Start all threads now: one that starts during a frame may find no memory for its stack. Raises RuntimeError."""
    pool, started = ThreadPoolExecutor(threads, "penstock"), Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(started.wait)
        started.wait()
    except BaseException:
        started.abort()
        pool.shutdown()
        raise
    return pool


def _work(left: deque[Task]) -> bool:
    good = True
    while True:
        try:
            task = left.popleft()
        except IndexError:
            return good
        good &= task()
