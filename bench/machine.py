"""The machine and the versions of a result, and the environment variables that set the number of threads.

It imports nothing that starts threads: ``settle`` must run before numpy and the other libraries are imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.base.threads import num_threads

# The libraries read these only when they are imported.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "RAYON_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)
DEPENDENCIES = ("jax", "jaxlib", "numpy", "pyarrow")


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that may use ``threads`` threads."""
    threads_of = dict.fromkeys(THREAD_VARIABLES, str(threads))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **threads_of, "TF_NUM_INTEROP_THREADS": "1", **quiet}


def settle(threads: int) -> None:
    """Pin this process to as many CPUs as it may have threads; XLA and other libraries count the CPUs at startup."""
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cpus[:threads])


def free_bytes() -> int:
    """Return the memory in bytes that is available without swapping."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def busy_s() -> float:
    """Return the busy seconds of the CPUs of this process, including time stolen by the host; 0 if unknown."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    ticks = 0
    for line in _lines("/proc/stat"):
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, fields[:8])
            ticks += user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Return the properties of the machine that affect results; nothing that identifies its owner."""
    first = dict(_field(line) for line in reversed(_lines("/proc/cpuinfo")))  # of the first CPU
    # The model name alone is that of many CPUs where a hypervisor hides it.
    numbers = [first[name] for name in ("cpu family", "model", "stepping") if name in first]
    pages = "".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "cpu": first.get("model name") or platform.processor() or platform.machine(),
        "cpu_model": "-".join(numbers),
        "architecture": platform.machine(),
        "cpus": num_threads(None),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "huge_pages": pages.partition("[")[2].partition("]")[0] or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def named(description: Mapping[str, Any]) -> str:
    """Return a machine in words: its CPU, how many of them, and its kernel. description : as ``describe`` returns it"""
    model = f" ({description['cpu_model']})" if description.get("cpu_model") else ""
    return f"{description['cpu']}{model}, {description['cpus']} CPUs, {description['system']}"


def folder_of(description: Mapping[str, Any]) -> str:
    """Return the name of a folder for the results of a machine; different machines have different ones."""
    name = re.sub(r"\((r|tm)\)|\bprocessor\b", "", named(description).lower())
    return re.sub(r"[^a-z0-9.]+", "-", name).strip("-")


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python, penstock's dependencies and the installed ones of the named distributions."""
    installed = {"python": platform.python_version()}
    for name in (*DEPENDENCIES, *distributions):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
