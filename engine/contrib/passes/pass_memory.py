"""The number of passes that fit the memory of this process, and the disk that they need."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock.base.control_groups import groups_of, lines_of
from penstock.base.errors import CapacityError
from penstock.base.flag_values import MOST_PASSES
from penstock.checkpoint.incremental import ring_bytes
from penstock.cli.output import nearest
from penstock.model.config.specs import TableSpec
from penstock.rows.key_directory import bytes_of_directories

# Bytes per row that do not depend on its width: a mark for commits, and a place in the map of its sums.
ROW_BYTES = 5
# The fraction of the free memory that rows may take; the rest is for frames and their sums. The bytes next to it are
# what compiling and reading allocate; the ring buffer of commits counts in addition.
FRACTION, OTHER_BYTES = 0.75, 96 << 20


def rows_bytes(specs: Iterable[TableSpec]) -> int:
    """Return the bytes of all rows with their slots, in memory and in a commit."""
    return sum(spec.vocabulary_size * _row_bytes(spec) for spec in specs)


def _row_bytes(spec: TableSpec) -> int:
    return 4 * sum(spec.part_dims)


def check_disk(folder: Path, specs: Iterable[TableSpec]) -> None:
    """Raise CapacityError if the disk of a folder, which need not exist, lacks room for the rows of all passes."""
    needed = rows_bytes(specs)
    free = shutil.disk_usage(nearest(folder)).free
    if needed > free:
        raise CapacityError(
            f"{folder}: the rows of all passes need {needed / 1e6:,.0f} MB of disk, and {free / 1e6:,.0f} MB are free; "
            "free some space, or name another folder"
        )


def num_passes(specs: Iterable[TableSpec], memory: int | None) -> int:
    """Return the least number of passes whose share of the tables fits in memory.

    memory : bytes that the process may use; None: the least of its limits and of the free memory
    Raises CapacityError if even MOST_PASSES do not.
    """
    specs = tuple(specs)
    of_rows, widest = rows_bytes(specs), max(map(_row_bytes, specs))
    needed = of_rows + sum(ROW_BYTES * spec.vocabulary_size + spec.cache_bytes for spec in specs)
    needed += sum(bytes_of_directories([(spec, 0)]) for spec in specs if spec.dynamic)
    used = 0 if memory is None else _status_bytes("RssAnon")  # without pages of files
    if memory is not None and memory <= used:
        raise CapacityError(
            f"--memory {memory}: the process uses {used / 1e6:,.0f} MB before it has a row; give more bytes than that"
        )
    free = max(0, available_bytes()) if memory is None else memory - used

    def others(count: int) -> int:
        return OTHER_BYTES + ring_bytes(of_rows // count, widest)

    for count in range(1, MOST_PASSES + 1):
        if needed <= count * FRACTION * (free - others(count)):
            return count
    raise CapacityError(
        f"--passes auto: {free / 1e6:,.0f} MB are free for tables of {needed / 1e6:,.0f} MB, and everything but rows "
        f"needs {others(MOST_PASSES) / 1e6:,.0f} MB; raise the limit of memory, or give --passes K"
    )


def available_bytes() -> int:
    """Return how many bytes this process may still allocate: by its limits, by those of its cgroup, and by free memory.

    Linux only; elsewhere all memory of the machine counts as free.
    """
    free = [line.split()[1] for line in lines_of(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    limits = [int(free[0]) << 10 if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - _status_bytes("VmData"))
    limits += [limit - used for limit, used in _cgroups()]
    return min(limits)


def _cgroups() -> Iterable[tuple[int, int]]:
    """Yield the limit of every cgroup that contains this process, and the memory used in it."""
    names = {True: ("memory.limit_in_bytes", "memory.usage_in_bytes"), False: ("memory.max", "memory.current")}
    for folder, is_first_version in groups_of("memory"):
        limit, used = names[is_first_version]
        with suppress(IndexError, ValueError):  # none, or "max"
            yield int(lines_of(folder / limit)[0]), int(lines_of(folder / used)[0])


def _status_bytes(field: str) -> int:
    """Return the bytes of a field of /proc/self/status, such as VmData; 0 where there is none."""
    values = (line.split()[1] for line in lines_of(Path("/proc/self/status")) if line.startswith(f"{field}:"))
    return int(next(values, "0")) << 10
