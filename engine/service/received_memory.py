"""The memory of received frames, which the process keeps for the next ones.

glibc returns a large block to the system when it is freed. The next frame then faults in every page again, which the
system clears first: a fifth of the time of a push (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Twice the messages of penstock's producers. Larger blocks are mapped one by one, and returned.
LARGEST_BLOCK = 4 << 20
MOST_KEPT = 1 << 30
_CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB of freed memory per heap of glibc; without glibc, do nothing.

    Settings of the environment (mallopt(3)) take precedence.
    """
    if any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)
