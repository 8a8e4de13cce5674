"""Every file operation that must survive a crash: checkpoints, tables, configurations, quarantined rows, deltas.

``operations`` is all that touches the disk, one method per call that can fail or be the last one before the
power goes: tests put another object in its place. The functions below keep the order that makes a file
whole or absent: written beside its name, fsync, rename, fsync of the folder. Errors are OSError and name a path.
Files are opened through the reserve of descriptors, where one is held.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, cast

from penstock.io.storage.descriptors import reserve

# One write to the system per so many bytes: small ones are gathered, larger ones go through as they are.
BUFFER_BYTES = 1 << 17
# ``write_along`` asks for this much at a time.
ALONG_BYTES = 1 << 22
_SYNC_FILE_RANGE_WRITE = 2


class Operations:
    """The calls to the system that leave something behind."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new file, or an old one emptied; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def open_lock(self, path: Path) -> int:
        """A file that is there for its lock alone, made where there is none; its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def resume(self, path: Path, num_bytes: int) -> int:
        """A file that is there, cut to so many bytes; its descriptor, at the end."""
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            os.lseek(file, num_bytes, os.SEEK_SET)
        except BaseException:
            os.close(file)
            raise
        return file

    def write(self, file: int, data: Any) -> int:
        """How many bytes were taken: fewer than given is allowed."""
        return os.write(file, data)

    def write_along(self, file: int, first: int, num_bytes: int) -> None:
        """Begin to write these bytes to the disk, where the system can be asked to. Waits for nothing."""
        if (begin := _sync_file_range()) is not None:
            begin(file, first, num_bytes, _SYNC_FILE_RANGE_WRITE)  # an error comes out of ``sync``

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux' call of this name, which Python does not have. posix_fadvise would begin it too, but drops pages."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], int] | None", found)


operations = Operations()


class _Unbuffered(io.RawIOBase):
    """A file on disk as Python's buffers want it, through ``operations``."""

    def __init__(self, path: Path, name: Path, kept_bytes: int | None) -> None:
        super().__init__()
        self._path = name
        self.num_bytes = self._along = kept_bytes or 0
        with _naming(name):
            self._file = reserve.open(
                lambda: operations.create(path) if kept_bytes is None else operations.resume(path, kept_bytes)
            )

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def write(self, data: Any) -> int:
        with _naming(self._path):
            taken = operations.write(self._file, data)
        self.num_bytes += taken
        return taken

    def write_along(self) -> None:
        if self.num_bytes - self._along >= ALONG_BYTES:
            first, self._along = self._along, self.num_bytes
            with _naming(self._path):
                operations.write_along(self._file, first, self._along - first)

    def sync(self) -> None:
        with _naming(self._path):
            operations.sync(self._file)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._file)


class File(io.BufferedWriter):
    """A binary file to write to. Without ``sync`` or ``finish`` nothing is promised of what was written.

    name : for errors, where the file is one day to be called otherwise
    kept_bytes : of a file that is there, how many of its first bytes stay; None for a new file
    """

    def __init__(self, path: Path, name: Path | None = None, kept_bytes: int | None = None) -> None:
        self._unbuffered = _Unbuffered(path, name or path, kept_bytes)
        super().__init__(self._unbuffered, BUFFER_BYTES)

    def write_along(self) -> None:
        """Now and then, have the system begin to write what there is: ``sync`` at the end then has little to do."""
        self._unbuffered.write_along()

    def sync(self) -> None:
        """Everything written so far is on disk."""
        self.flush()
        self._unbuffered.sync()

    def finish(self) -> None:
        """Everything is on disk; then close."""
        self.sync()
        self.close()

    def give_up(self) -> None:
        """Close, whatever becomes of what is still in the buffer."""
        with suppress(OSError, ValueError):
            self._unbuffered.close()
        with suppress(OSError, ValueError):
            self.close()


def unfinished(path: Path) -> Path:
    """Where a file is written before it has its name: beside it, hidden, this thread's own."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def discard_orphans(path: Path) -> None:
    """Remove what processes of this machine left of a file when they were killed."""
    for part in path.parent.glob(f".{escape(path.name)}.*-*.part"):
        process = part.name.rsplit(".", 2)[1].partition("-")[0]
        if process.isdecimal() and not _lives(int(process)):
            discard(part)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


@contextmanager
def appearing(path: Path) -> Iterator[File]:
    """A file that has its name when the ``with`` ends well, whole and on disk; else nothing is left behind."""
    part = unfinished(path)
    with written(part, path) as file:
        yield file
    try:
        rename(part, path)
        sync_folder(path.parent)
    except BaseException:
        discard(part)
        raise


@contextmanager
def written(path: Path, name: Path | None = None) -> Iterator[File]:
    """A file that is on disk when the ``with`` ends well, and removed when it does not. name : for errors"""
    file = File(path, name)
    try:
        yield file
        file.finish()
    except BaseException:
        file.give_up()
        discard(path)
        raise


def rename(old: Path, new: Path) -> None:
    """Give a file its name, over one that has it; outlives a loss of power after ``sync_folder``."""
    with _naming(new):
        operations.rename(old, new)


def sync_folder(path: Path) -> None:
    """The names in it are on disk."""
    with _naming(path):
        reserve.open(lambda: operations.sync_folder(path))


def remove(path: Path) -> None:
    """Remove a file, or see that it is gone."""
    with suppress(FileNotFoundError), _naming(path):
        operations.remove(path)


def discard(path: Path) -> None:
    """Remove a file where that is possible: what is raised already counts more than what this would say."""
    with suppress(OSError):
        operations.remove(path)


def make_folders(path: Path) -> None:
    """A folder with all above it, each of them on disk; fine where it exists."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folders(path.parent)
    with suppress(FileExistsError):  # another process may be as quick; where it is a file, that is said below
        with _naming(path):
            operations.make_folder(path)
        sync_folder(path.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path))


def open_lock(path: Path) -> int:
    """A descriptor to lock."""
    with _naming(path):
        return reserve.open(lambda: operations.open_lock(path))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
