"""Every file operation that must survive a crash: checkpoints, tables, configurations, quarantined rows, deltas.

``operations`` makes all calls that touch the disk, one method per call that can fail or be the last one before a
power failure: tests replace the object. The functions below keep the order that makes a file
complete or absent: temporary file in the same folder, fsync, rename, fsync of the folder. Errors are OSError and
name a path.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, cast

import penstock.base.forks as forks

# The size of one write to the system: smaller writes are buffered, larger ones pass through.
BUFFER_BYTES = 1 << 17
# Writeback starts for this much at a time, so that ``sync`` at the end has little to do.
ALONG_BYTES = 1 << 22
_SYNC_FILE_RANGE_WRITE = 2
# Why a file cannot have a second name: another file system, one without links, or too many names.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Operations:
    """The system calls that change the file system."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create or truncate a file; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def open_lock(self, path: Path) -> int:
        """Open a lock file, or create it; return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def resume(self, path: Path, num_bytes: int) -> int:
        """Truncate an existing file to a length; return its descriptor, positioned at the end."""
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(file, num_bytes)
            os.lseek(file, num_bytes, os.SEEK_SET)
        except BaseException:
            os.close(file)
            raise
        return file

    def write(self, file: int, data: Any) -> int:
        """Write; return the number of bytes written, which may be fewer than given."""
        return os.write(file, data)

    def write_along(self, file: int, first: int, num_bytes: int) -> None:
        """Start writeback of these bytes, if the system supports it, without waiting."""
        if (begin := _sync_file_range()) is not None:
            begin(file, first, num_bytes, _SYNC_FILE_RANGE_WRITE)  # ``sync`` reports the error

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

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Call Linux's sync_file_range, which Python lacks. posix_fadvise would start writeback too, but drops pages."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], int] | None", function)


operations = Operations()


class _Unbuffered(io.RawIOBase):
    """A raw file for Python's buffered writer, through ``operations``."""

    def __init__(self, path: Path, name: Path, kept_bytes: int | None) -> None:
        super().__init__()
        self._path, self.process = name, forks.this_process
        self.num_bytes = self._along = kept_bytes or 0
        self._file = -1  # Python closes also an object whose file could not be opened
        with _naming(name):
            self._file = operations.create(path) if kept_bytes is None else operations.resume(path, kept_bytes)
        forks.keep(self._file)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def write(self, data: Any) -> int:
        forks.check(self.process, str(self._path))
        with _naming(self._path):
            taken = operations.write(self._file, data)
            self.num_bytes += taken
            if self.num_bytes - self._along >= ALONG_BYTES:
                first, self._along = self._along, self.num_bytes
                operations.write_along(self._file, first, self._along - first)
        return taken

    def sync(self) -> None:
        with _naming(self._path):
            operations.sync(self._file)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._file >= 0:
                forks.close(self._file)


class File(io.BufferedWriter):
    """A binary file that gets its name, complete and durable, with ``finish``. Raises OSError, which names ``path``.

    part : its path until then; None: the default one, and a ``path`` that is a symbolic link stays: the file that it
        leads to is replaced
    kept_bytes : length to which an existing part is truncated; None for a new file
    """

    def __init__(self, path: Path, part: Path | None = None, kept_bytes: int | None = None) -> None:
        self.path = _target(path) if part is None else path
        self.part = part or unfinished(self.path)
        self._unbuffered = _Unbuffered(self.part, path, kept_bytes)
        super().__init__(self._unbuffered, BUFFER_BYTES)

    def sync(self) -> None:
        """Make everything written so far durable."""
        self.flush()
        self._unbuffered.sync()

    def complete(self) -> None:
        """Sync, then close."""
        forks.check(self._unbuffered.process, str(self.path))
        self.sync()
        self.close()

    @property
    def is_forked(self) -> bool:
        """Return whether another process, which this one is a fork of, writes the file."""
        return self._unbuffered.process != forks.this_process

    def publish(self) -> None:
        """Give the complete file its name; durable after ``sync_folder``."""
        forks.check(self._unbuffered.process, str(self.path))
        rename(self.part, self.path)

    def finish(self) -> None:
        """Complete the file and give it its name, durably."""
        with self.all_or_nothing():
            self.complete()
            self.publish()
            sync_folder(self.path.parent)

    def give_up(self) -> None:
        """Close without a name, and remove what was written."""
        self.abandon()
        if not self.is_forked:
            discard(self.part)

    def abandon(self) -> None:
        """Close, and discard the contents of the buffer."""
        for stream in (self._unbuffered, self):
            with suppress(OSError, ValueError):
                stream.close()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Give up after an error in the block."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise


def unfinished(path: Path) -> Path:
    """Return the path of a file before it has its name: hidden, in the same folder, unique to this thread."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")


def _target(path: Path) -> Path:
    """Return the file that a path leads to. Raises OSError for a folder, a pipe or a device: none may be replaced."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        problem = "is a pipe or a device; give a file, which appears only when it is complete"
        raise OSError(errno.EINVAL, problem, str(path))
    return target


def discard_orphans(path: Path) -> None:
    """Remove the unfinished files that killed processes of this machine left."""
    path = Path(os.path.realpath(path))
    for part in path.parent.glob(f".{escape(path.name)}.*-*.part"):
        process = part.name.rsplit(".", 2)[1].partition("-")[0]
        if process.isdecimal() and not _lives(int(process)):
            discard(part)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


@contextmanager
def publishing(path: Path) -> Iterator[File]:
    """Write a file that gets its name, complete and durable, when the block succeeds; else remove it."""
    file = File(path)
    with file.all_or_nothing():
        yield file
    file.finish()


def rename(old: Path, new: Path) -> None:
    """Rename a file, replacing an existing one; durable after ``sync_folder``."""
    with _naming(new):
        operations.rename(old, new)


def link(old: Path, new: Path) -> None:
    """Give a file a second name in the same file system, which no file has; durable after ``sync_folder``."""
    with _naming(new):
        operations.link(old, new)


def link_if_possible(old: Path, new: Path) -> bool:
    """Do the same as ``link``. Return False if the file system, or the distance between both, allows no second name."""
    try:
        link(old, new)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with _naming(path):
        operations.sync_folder(path)


def remove(path: Path) -> None:
    """Remove a file, or see that it is gone."""
    with suppress(FileNotFoundError), _naming(path):
        operations.remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder with everything in it, or see that it is gone."""
    with suppress(FileNotFoundError), _naming(path):
        operations.remove_folder(path)


def discard(path: Path) -> None:
    """Remove a file if possible: an error that is being raised already matters more than a failure here."""
    with suppress(OSError):
        operations.remove(path)


def make_folders(path: Path) -> None:
    """Create a folder and its parents, each durable; an existing folder is no error."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folders(path.parent)
    with suppress(FileExistsError):  # another process may create it too; if it is a file, the next call raises
        with _naming(path):
            operations.make_folder(path)
        sync_folder(path.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path))


def lock(path: Path) -> int:
    """Lock a file, which is created, until ``forks.close`` of the result.

    Raises BlockingIOError, whose text names the process that holds the lock.
    """
    with _naming(path):
        file = forks.keep(operations.open_lock(path))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # locked, a file system without locks, or a lock that is not a file
            if isinstance(error, BlockingIOError):
                error.strerror = os.pread(file, 300, 0).decode("utf-8", "replace").strip() or "of an unknown process"
            forks.close(file)
            raise
        with suppress(OSError):  # only for messages
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return file


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
