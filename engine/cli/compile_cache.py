"""Where JAX keeps compiled programs from one command to the next: a folder of the user's, for this kind of machine.

JAX does the work, and takes a folder that cannot be written or holds rubbish as no cache; here is only said which.
"""

from __future__ import annotations

import os
import platform
import zlib
from pathlib import Path

SETTING = "PENSTOCK_COMPILE_CACHE"
OFF = ("0", "off", "")


def keep_compiled() -> None:
    """Tell JAX, before it is loaded, through the environment; what the user told it himself stays."""
    folder = compile_cache()
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # JAX keeps only what took a second to compile; our programs are many and small.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def compile_cache() -> Path | None:
    """The folder; None where the environment says off, or there is no home to keep it in."""
    said = os.environ.get(SETTING)
    if said is not None:
        return None if said in OFF else Path(said) / machine_kind()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the XDG specification: a relative one is to be ignored
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home, "penstock", machine_kind()) if os.path.isabs(home) else None


def machine_kind() -> str:
    """``x86_64-1a2b3c4d``: machines with other CPU features get another folder, since homes are shared.

    JAX's own key does not look at them, and code for AVX-512 ends a process that has none.
    """
    return f"{platform.machine()}-{zlib.crc32(cpu_features().encode()):08x}"


def cpu_features() -> str:
    """What the CPU can do, as Linux says it: ``fpu vme … avx2 …``; "" where it does not."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, said = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return said.strip()
    except OSError:
        pass
    return ""
