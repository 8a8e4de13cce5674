"""A file that grows during a run: what a checkpoint counts of it outlives a crash, and whole it has its name.

While FILE grows it is ``.FILE.part``. With a checkpoint it gets its name only when a commit counts it: a run that ends
before is repeated as if it had not been. What is written into it is ``delta_file``'s and ``quarantine``'s matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.io.storage import atomic_files

# Whether a checkpoint counts a new file, asked when it is closed; None: there is no checkpoint.
IsCounted = Callable[[], bool] | None


class GrowingFile:
    """Written to until ``finish``. Errors are OSError, which names the file.

    path : the name it gets
    kept_bytes : how much of it a commit counts and stays; None for a new file
    is_counted : without a checkpoint a file gets its name whatever ends the run
    """

    def __init__(self, path: Path, kept_bytes: int | None = None, is_counted: IsCounted = None) -> None:
        self._path, self._part = path, part_of(path)
        self.is_new = kept_bytes is None
        self._committed, self._is_counted = not self.is_new, is_counted
        atomic_files.make_folders(path.parent)
        if kept_bytes is not None and not self._part.exists():
            atomic_files.rename(path, self._part)
        self.file = atomic_files.File(self._part, path, kept_bytes)

    @property
    def closed(self) -> bool:
        return self.file.closed

    @property
    def gets_name(self) -> bool:
        return not self.is_new or self._is_counted is None or self._is_counted()

    def commit(self) -> None:
        """Everything written is on disk and stays, whatever follows."""
        with self.all_or_nothing():
            self.file.sync()
            if not self._committed:
                atomic_files.sync_folder(self._path.parent)
        self._committed = True

    def finish(self) -> None:
        """It is whole, on disk and under its name."""
        with self.all_or_nothing():
            self.file.finish()
            atomic_files.rename(self._part, self._path)
            atomic_files.sync_folder(self._path.parent)

    def give_up(self) -> None:
        """No commit counts it: close. What a commit that failed may count all the same stays as ``.FILE.part``."""
        self.file.give_up()
        if not self._committed:
            atomic_files.discard(self._part)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """After an error in here nothing more is written, and nothing is left but what was committed."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise


def part_of(path: Path) -> Path:
    """Where a file lies while it grows."""
    return path.with_name(f".{path.name}.part")


def found_at(path: Path, check_new: Callable[[Path], None]) -> Path:
    """Where a file lies that another run wrote: under its name where that run ended, and then nothing else does."""
    part = part_of(path)
    if not part.exists():
        return path
    check_new(path)
    return part
