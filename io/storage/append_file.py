"""A file that grows during a run: its committed part survives a crash, and it gets its name when it is complete.

While FILE grows, it is ``.FILE.part``. With a checkpoint it gets its name only when a commit refers to it: a run that
ends earlier is repeated from scratch. ``delta_sink`` and ``quarantine`` define the contents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.io.storage import atomic_files

# Whether a commit refers to a new file, called when it is closed; None: there is no checkpoint.
IsCounted = Callable[[], bool] | None


class GrowingFile:
    """A file to append to until ``finish``. Raises OSError, which names the file.

    path : the final name
    kept_bytes : the committed length, to be kept; None for a new file
    is_counted : without a checkpoint a file gets its name however the run ends
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
        """Make everything written so far durable."""
        with self.all_or_nothing():
            self.file.sync()
            if not self._committed:
                atomic_files.sync_folder(self._path.parent)
        self._committed = True

    def finish(self) -> None:
        """Complete the file: sync it and give it its name."""
        with self.all_or_nothing():
            self.file.finish()
            atomic_files.rename(self._part, self._path)
            atomic_files.sync_folder(self._path.parent)

    def give_up(self) -> None:
        """Close without a name. A part that a failed commit may still refer to stays as ``.FILE.part``."""
        self.file.give_up()
        if not self._committed:
            atomic_files.discard(self._part)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """After an error in the block, write nothing more and keep only the committed part."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise


def part_of(path: Path) -> Path:
    """Return the path of a file while it grows."""
    return path.with_name(f".{path.name}.part")


def found_at(path: Path, check_new: Callable[[Path], None]) -> Path:
    """Return the path of a file of another run: ``.FILE.part`` if that exists, where FILE must not, else FILE."""
    part = part_of(path)
    if not part.exists():
        return path
    check_new(path)
    return part
