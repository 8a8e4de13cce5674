"""A file that grows beside checkpoints: what was committed of it outlives a crash, and whole it has its name.

While FILE grows it is ``.FILE.part``. What is written into it is ``delta_file``'s and ``quarantine``'s matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.io import durable


class GrowingFile:
    """Written to until ``finish``. Errors are OSError, which names the file.

    path : the name it gets
    committed : whether what is in it already outlives this object
    kept_bytes : how much of it stays; None for a new file
    """

    def __init__(self, path: Path, committed: bool, kept_bytes: int | None = None) -> None:
        self._path, self._part, self._committed = path, part_of(path), committed
        durable.make_folders(path.parent)
        self.file = durable.File(self._part, path, kept_bytes)

    @property
    def closed(self) -> bool:
        return self.file.closed

    def commit(self) -> None:
        """Everything written is on disk and stays, whatever follows."""
        with self.all_or_nothing():
            self.file.sync()
            if not self._committed:
                durable.sync_folder(self._path.parent)
        self._committed = True

    def finish(self) -> None:
        """It is whole, on disk and under its name."""
        with self.all_or_nothing():
            self.file.finish()
            durable.rename(self._part, self._path)
            durable.sync_folder(self._path.parent)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """After an error in here nothing more is written, and nothing is left but what was committed."""
        try:
            yield
        except BaseException:
            self.file.give_up()
            if not self._committed:
                durable.discard(self._part)
            raise


def part_of(path: Path) -> Path:
    """Where a file lies while it grows."""
    return path.with_name(f".{path.name}.part")


def grows_again(path: Path, check_new: Callable[[Path], None]) -> Path:
    """Take its name from a file of a run that ended; check_new(path) where one grows already. Returns where it lies."""
    part = part_of(path)
    if not part.exists() and path.exists():
        durable.rename(path, part)
    elif part.exists():
        check_new(path)
    return part
