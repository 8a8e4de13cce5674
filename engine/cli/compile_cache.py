"""The directory in which JAX caches compiled programs between commands: per user and per kind of machine.

This module only selects the directory. JAX ignores one that cannot be written or holds damaged entries.
"""

from __future__ import annotations

import os
import platform
import zlib
from contextlib import suppress
from pathlib import Path

SETTING = "PENSTOCK_COMPILE_CACHE"
OFF = ("0", "off", "")


def keep_compiled() -> None:
    """Configure JAX's cache through the environment, before JAX is loaded; keep the user's own settings."""
    folder = compile_cache()
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # By default JAX caches only programs that took a second to compile; penstock's programs are many and small.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def compile_cache() -> Path | None:
    """Return the cache directory; None if the environment turns it off or there is no home directory."""
    value = os.environ.get(SETTING)
    if value is not None:
        return None if value in OFF else Path(value) / machine_kind()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification says to ignore a relative path
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home, "penstock", machine_kind()) if os.path.isabs(home) else None


def machine_kind() -> str:
    """Return a name such as ``x86_64-1a2b3c4d`` that differs between CPU features, since home directories are shared.

    JAX's cache key ignores CPU features, and code compiled for AVX-512 kills the process on a CPU without it.
    """
    return f"{platform.machine()}-{zlib.crc32(cpu_features().encode()):08x}"


def cpu_features() -> str:
    """Return the CPU's features as Linux reports them, such as ``fpu vme … avx2 …``; "" if it reports none."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return value.strip()
    return ""
