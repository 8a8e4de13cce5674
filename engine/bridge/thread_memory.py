"""Whether the limits of memory leave room for the threads of jax: XLA aborts the process if it cannot start one.

The needs are measured on Linux with jax 0.10 (docs/cli.md): VmData and VmSize before jax is loaded, and after an
engine was created, on 1 and 2 CPUs and with 4 and 8 host devices. RLIMIT_NPROC and the limits of a cgroup are not
examined: they count what other processes do.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from penstock.control_groups import lines_of
from penstock.errors import CapacityError
from penstock.threads import num_cpus

MB = 10**6


def check_thread_memory() -> None:
    """Raise CapacityError if RLIMIT_DATA or RLIMIT_AS leave too little to load jax, unless it is loaded."""
    if "jax" in sys.modules:
        return
    width = num_cpus()
    needs = (
        (resource.RLIMIT_DATA, "ulimit -d", "VmData", (60 + 18 * width + 16 * min(width, 3)) * MB),
        (resource.RLIMIT_AS, "ulimit -v", "VmSize", (1000 + 50 * width) * MB),
    )
    for limit, command, field, needed in needs:
        soft, used = resource.getrlimit(limit)[0], status_bytes(field)
        if soft != resource.RLIM_INFINITY and used and soft - used < needed:
            raise CapacityError(
                f"out of memory: the limit ({command} {soft >> 10}) leaves {max(0, soft - used) // MB} MB, and jax "
                f"with its threads on {width} CPUs needs about {needed // MB} MB before the tables; raise it"
            )


def status_bytes(field: str) -> int:
    """Return the bytes of a field of /proc/self/status, such as VmData; 0 where there is none."""
    values = (line.split()[1] for line in lines_of(Path("/proc/self/status")) if line.startswith(f"{field}:"))
    return int(next(values, "0")) << 10
