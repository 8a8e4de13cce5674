"""The lock of a folder of shared tables: who writes them, and whether that program still runs.

A lock of an open file description (Linux): it ends with the program however that ends, and can be looked at without
taking it, so that no reader is ever in the way of a writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

import penstock.base.forks as forks
from penstock.base.errors import StateError, UsageError

LOCK = ".lock"
_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, process


def lock(path: Path) -> int:
    """Lock the folder until ``unlock`` of the result. Raises StateError if another program writes its tables."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise UsageError(f"{path}: shared tables need Linux")
    name = os.fspath(path / LOCK)
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise StateError(
                f"{path}: another program writes the shared tables of this folder; stop it first"
            ) from None
        error.filename = name
        raise
    return forks.keep(file)


def unlock(file: int) -> None:
    """Unlock the folder."""
    forks.close(file)


def note_generation(file: int, generation: int) -> None:
    """Store which generation the holder of the lock writes."""
    os.pwrite(file, f"{generation:020}".encode(), 0)


def is_written(path: Path, generation: int) -> bool:
    """Return whether the program that writes a generation still runs."""
    return _locked_generation(path) == generation


def is_locked(path: Path) -> bool:
    """Return whether any program writes the folder: another one than that of the current tables prepares new ones."""
    return _locked_generation(path) is not None


def _locked_generation(path: Path) -> int | None:
    """Return the generation that the holder of the lock writes, 0: none yet; None where no program holds it."""
    with suppress(OSError):
        file = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, wanted))[0]
            text = os.pread(file, 20, 0)
            return None if kind == fcntl.F_UNLCK else int(text) if text.isdigit() else 0
        finally:
            os.close(file)
    return None


def boot_id() -> str:
    """Return what identifies the run of this machine; "" where the kernel does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
