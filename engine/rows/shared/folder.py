"""The folder of shared tables as its writer has it: one generation of files at a time.

A generation is made under new names, with all its room allocated, and appears when its header is renamed into place.
The header before it is then marked as closed, and its files are removed: readers that have them mapped reopen. Files
never shrink, so that no reader meets a missing page.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import CapacityError, StateError, UsageError, listed
from penstock.base.filesystem.atomic_files import make_folders
from penstock.base.filesystem.state_files import open_regular
from penstock.base.validation import place
from penstock.model.version import Version
from penstock.pyx.row_reads import StepWords
from penstock.rows.shared.header import (
    CLOSED,
    FAILED,
    FILE_NAME,
    HEADER,
    HISTORY_BEGIN,
    MAGIC,
    WORDS_BEGIN,
    Description,
    HeaderHistory,
    TableLayout,
    packed,
    unpacked,
)
from penstock.rows.shared.locks import LOCK, boot_id, lock, note_generation, unlock

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class SharedFolder:
    """Creates the files of one generation after the other, and publishes each.

    Locks the folder until ``close``, or until the program ends. Raises StateError if another program writes it.

    words, history : of the published generation; None: none is published yet. Its history is changed within a step
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = place("shared", path)
        make_folders(self.path)
        self._check_names()
        try:
            self._lock = lock(self.path)
        except StateError:
            gc.collect()  # an engine of this process that nothing refers to any more
            self._lock = lock(self.path)
        self.words: StepWords | None = None
        self.history: HeaderHistory | None = None
        self._published = self._newest()
        self._files: dict[str, int] = {}  # of the next generation
        self._names: dict[int, str] = {}  # address of an array → its file
        self._end = weakref.finalize(self, _end, os.getpid(), self._lock, self.path, self._files)
        self._begin()

    def _check_names(self) -> None:
        """Raise UsageError if there are files that are not those of shared tables, which a start removes."""
        others = [name for name in os.listdir(self.path) if name not in (LOCK, HEADER) and not _is_own(name)]
        with suppress(FileNotFoundError), open_regular(self.path / HEADER) as file:
            others += [HEADER] if file.read(len(MAGIC)) != MAGIC else []
        if others:
            raise UsageError(f"{self.path}: holds other files ({listed(sorted(others))}); choose a new folder")

    def _newest(self) -> int:
        """Return the number of the newest generation that has left a file; 0: none."""
        numbers = [int(name.split("-")[1]) for name in os.listdir(self.path) if _is_own(name)]
        with suppress(OSError, StateError):
            numbers.append(unpacked((self.path / HEADER).read_bytes(), self.path).generation)
        return max(numbers, default=0)

    def _begin(self) -> None:
        self.generation = self._published + 1
        note_generation(self._lock, self._published if self.words is not None else self.generation)

    def allocate(self, kind: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array (count,) of zeros in a new file of the next generation. kind : "rows", "pages" or "keys"

        Raises CapacityError if there is no room for it; the files of the next generation are gone then.
        """
        num_bytes = max(1, count) * np.dtype(dtype).itemsize
        name = f"{kind}-{self.generation}-{len(self._files)}"
        try:
            memory = _created(self.path / name, num_bytes)
        except OSError as error:
            self.discard()
            if error.errno in _NO_ROOM:
                raise CapacityError(
                    f"{self.path}: no room for shared tables ({num_bytes:,} bytes of {kind}: {error.strerror}); free "
                    "some space, or choose another folder"
                ) from None
            raise
        self._files[name] = num_bytes
        array = np.frombuffer(memory, dtype, count)
        self._names[array.ctypes.data] = name
        return array

    def name(self, array: npt.NDArray[Any]) -> str:
        """Return the file of an array that ``allocate`` returned."""
        return self._names[array.ctypes.data]

    def publish(
        self,
        tables: Sequence[TableLayout],
        threads: int,
        version: Version,
        durable_step: int = 0,
        config: str = "",
        within_step: bool = False,
    ) -> StepWords:
        """Make the next generation the one that readers open, and return its words.

        version, durable_step : which rows the files have
        within_step : the rows are between this step and the next one, which the caller ends
        """
        data = packed(Description(self.generation, boot_id(), config, threads, self._files, tables))
        part = self.path / f".{HEADER}-{self.generation}-0"
        try:
            memory = _created(part, len(data))
            memory[:] = data
            header = np.frombuffer(memory, np.uint8)
            words = StepWords(header[WORDS_BEGIN:HISTORY_BEGIN].view(np.uint64))
            self.history = HeaderHistory(header)
            self.history.write(version)
            words.end(version.step)
            if within_step:
                words.begin()
            words.durable_step = durable_step
            note_generation(self._lock, self.generation)
            close_before = _closes(self.path / HEADER)
            os.replace(part, self.path / HEADER)
            self._header = os.stat(self.path / HEADER)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            self.discard()
            raise
        close_before()
        self.words, self._published, kept = words, self.generation, {HEADER, *self._files}
        self._files.clear()  # they stay
        self._names.clear()
        for name in os.listdir(self.path):
            if name not in kept and _is_own(name):
                with suppress(OSError):
                    os.unlink(self.path / name)
        self._begin()
        return words

    def check_there(self) -> None:
        """Raise OSError if readers cannot open the published tables any more."""
        with suppress(OSError):
            if os.path.samestat(self._header, os.stat(self.path / HEADER)):
                return
        problem = "the shared tables are gone: the folder was removed or replaced; start again"
        raise OSError(errno.ESTALE, problem, os.fspath(self.path))

    def fail(self) -> None:
        """Mark the published tables as those of a step that failed half way: readers refuse them."""
        if self.words is not None:
            self.words.state = FAILED

    def discard(self) -> None:
        """Remove the files of the next generation."""
        _remove(self.path, self._files)
        self._names.clear()

    def lock(self) -> None:
        """Lock the folder again after ``close``. Raises StateError if another program writes it."""
        self._lock = lock(self.path)
        self._end = weakref.finalize(self, _end, os.getpid(), self._lock, self.path, self._files)
        note_generation(self._lock, self._published)

    def close(self) -> None:
        """Unlock the folder. The published files stay, with the rows of the last step."""
        self._end()


def _end(process: int, lock_file: int, path: Path, files: dict[str, int]) -> None:
    if os.getpid() == process:  # else in a process that it has forked, which ends
        _remove(path, files)
        unlock(lock_file)


def _remove(path: Path, files: dict[str, int]) -> None:
    """Remove files of a generation that is not published."""
    for name in files:
        with suppress(OSError):
            os.unlink(path / name)
    files.clear()


def _is_own(name: str) -> bool:
    """Return whether a name is that of a file of a generation."""
    return bool(FILE_NAME.fullmatch(name.removeprefix(".")))


def _created(path: Path, num_bytes: int) -> mmap.mmap:
    """Return the memory of a new file, of which every block is allocated: a full disk would end the process later."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        memory = mmap.mmap(file, num_bytes)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(file)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has none for files
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _closes(path: Path) -> Callable[[], None]:
    """Return a function that marks the header as closed, also after another one has taken its name."""
    with suppress(OSError, ValueError):
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), HISTORY_BEGIN)
        words = StepWords(np.frombuffer(memory, np.uint64)[WORDS_BEGIN // 8 : HISTORY_BEGIN // 8])

        def close() -> None:
            words.state = CLOSED

        return close
    return lambda: None
