"""The control groups of this process (Linux, versions 1 and 2), whose limits are those of its container or unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def groups_of(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of every group that contains this process, its own first, and whether it is of version 1.

    A folder that does not exist is yielded too: in a container, the process's own group lies at the root.
    """
    for line in lines_of(Path("/proc/self/cgroup")):
        _, kinds, name = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        root = Path("/sys/fs/cgroup", kinds)
        folder = root / name.lstrip("/")
        for ancestor in (folder, *folder.parents):
            if ancestor.is_relative_to(root):
                yield ancestor, bool(kinds)


def cpu_quota() -> float | None:
    """Return how many CPUs the groups grant this process; None: no limit."""
    quotas = []
    for folder, is_first_version in groups_of("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
        with suppress(ValueError):  # no such file, or "max"
            limit_us, period_us = (
                int(word) for name in names for line in lines_of(folder / name) for word in line.split()
            )
            if limit_us > 0 and period_us > 0:
                quotas.append(limit_us / period_us)
    return min(quotas, default=None)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
