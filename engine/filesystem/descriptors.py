"""File descriptors: the limit of this process, and a reserve for files that must be written.

Every connection to a service takes a descriptor of its process. If none is left, a file that must be written is
opened with one of the reserve, or as soon as one is free.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

# Python and gRPC iterate over all numbers up to the soft limit in places, and some hosts allow a billion.
MOST = 1 << 16
PATIENCE_S, PAUSE_S = 30.0, 0.05
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> None:
    """Raise the soft limit of this process to the hard one, to 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit that it does not report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return the soft limit of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else soft


class Reserve:
    """Unused open descriptors, to be closed when the process has no other left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._reserved: list[int] = []

    def hold(self, count: int) -> None:
        """Reserve more descriptors."""
        with self._lock:
            self._wanted += count
        self.fill()

    def release(self, count: int) -> None:
        """Reserve fewer descriptors."""
        with self._lock:
            self._wanted -= count
            while len(self._reserved) > self._wanted:
                os.close(self._reserved.pop())

    def fill(self) -> None:
        """Refill the reserve, as far as the process has descriptors left."""
        with self._lock, suppress(OSError):
            while len(self._reserved) < self._wanted:
                self._reserved.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def open(self, call: Callable[[], T]) -> T:
        """Return the result of a call that needs a descriptor.

        If the process has none left and there is a reserve, release one and repeat the call for up to ``PATIENCE_S``.
        """
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except OSError as error:
                if error.errno not in _NONE_LEFT or not self._wanted or time.monotonic() > until_s:
                    raise
            if not self._lend():
                time.sleep(PAUSE_S)

    def _lend(self) -> bool:
        """Close one descriptor of the reserve. Return False if it is empty."""
        with self._lock:
            if not self._reserved:
                return False
            os.close(self._reserved.pop())
            return True


reserve = Reserve()
