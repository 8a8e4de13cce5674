"""When the thread that hashes and writes may work: right after a step, for a share of the time that the last one took.

With as many threads in a step as there are cores a third thread makes it late, by a time slice where it is unlucky;
and whenever it wakes it wants the interpreter, for which the step then waits. Between two steps there is work that only
one thread can do; what is written then costs the steps little. So nothing else wakes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pace:
    """Time that one thread allows another. Nothing is allowed at first; ``hurry`` allows everything.

    Each counter is written by one thread alone, so there is no lock that a thread without a core could hold.
    """

    def __init__(self) -> None:
        self._allowed_s = self._used_s = 0.0
        self._hurried = False
        self._turn = threading.Event()

    def allow(self, seconds: float) -> None:
        """So much more may be worked; what was worked in a hurry does not count against it."""
        if self._hurried:
            self._hurried, self._allowed_s = False, self._used_s
        self._allowed_s += seconds
        self._turn.set()

    def hurry(self) -> None:
        """Nothing is in the way, or somebody waits: work until there is an allowance again."""
        self._hurried = True
        self._turn.set()

    def worked(self, seconds: float) -> None:
        """The other thread's side: so much of it is used up. Waits until there is more."""
        self._used_s += seconds
        self.wait_for(lambda: self._hurried or self._used_s < self._allowed_s)

    def wait_for(self, there: Callable[[], object]) -> None:
        """The other thread's side: wait until something is there, which is looked at when there is an allowance."""
        while not there():
            self._turn.clear()
            # What came between the two looks has set it again.
            if not there():
                self._turn.wait()

    def tell(self) -> None:
        """There may be something to wait for; where nothing is urgent the next allowance tells it as well."""
        if self._hurried:
            self._turn.set()
