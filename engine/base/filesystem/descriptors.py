"""The limit on the file descriptors of this process."""

from __future__ import annotations

import resource
from contextlib import suppress

# Python and gRPC iterate over all numbers up to the soft limit in places, and some hosts allow a billion.
MOST = 1 << 16


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
