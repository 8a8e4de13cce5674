"""The throttle of the thread that hashes and writes: it works right after a step, for a share of the last step's time.

If a step uses as many threads as there are cores, another thread delays it, by up to a time slice. Whenever that thread
wakes, it also takes the interpreter's lock, and the step waits for it. Between two steps some work is single-threaded,
and writing then costs the steps little. So the writing thread is woken only then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pace:
    """A throttle: the time that one thread allows another to work, none at first; ``expedite`` removes the limit.

    Each counter is written by one thread only, so no lock is needed, which a descheduled thread could hold.
    """

    def __init__(self) -> None:
        self._allowed_s = self._used_s = 0.0
        self._expedited = False
        self._turn = threading.Event()

    def allow(self, seconds: float) -> None:
        """Allow this much more work, in seconds, and end the expedited time, whose work does not count."""
        if self._expedited:
            self._expedited, self._allowed_s = False, self._used_s
        self._allowed_s += seconds
        self._turn.set()

    def expedite(self) -> None:
        """Allow unlimited work until the next ``allow``: no step runs, or a caller waits for the commit."""
        self._expedited = True
        self._turn.set()

    def add_work(self, seconds: float) -> None:
        """Count seconds of work, and wait until more is allowed. Called by the writing thread."""
        self._used_s += seconds
        self.wait_for(lambda: self._expedited or self._used_s < self._allowed_s)

    def wait_for(self, there: Callable[[], object]) -> None:
        """Wait until ``there`` returns true, checked at every allowance. Called by the writing thread."""
        while not there():
            self._turn.clear()
            # An event between the two checks has set it again.
            if not there():
                self._turn.wait()

    def wake(self) -> None:
        """Wake the writing thread for new work while expedited; otherwise the next allowance wakes it."""
        if self._expedited:
            self._turn.set()
