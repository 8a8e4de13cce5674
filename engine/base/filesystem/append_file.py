"""A file that grows during a run: its committed part survives a crash, and it gets its name when it is complete.

While FILE grows, it is ``.FILE.part``. With a checkpoint it gets its name only when a commit refers to it: a run that
ends earlier is repeated from scratch. ``delta_sink`` and ``quarantine`` define the contents.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.base.errors import UsageError
from penstock.base.filesystem import atomic_files

# Whether a commit refers to a new file, called when it is closed; None: there is no checkpoint.
IsCommitted = Callable[[], bool] | None


class GrowingFile(atomic_files.File):
    """A file to append to until ``end``. Raises OSError, which names the file.

    path : the final name
    kept_bytes : the committed length, to be kept; None for a new file
    is_committed : as above; without a checkpoint a file gets its name however the run ends
    """

    def __init__(self, path: Path, kept_bytes: int | None = None, is_committed: IsCommitted = None) -> None:
        self.is_new = kept_bytes is None
        self._committed, self._is_committed = not self.is_new, is_committed
        atomic_files.make_folders(path.parent)
        part = part_of(path)
        if kept_bytes is not None and not part.exists():
            atomic_files.rename(path, part)
        super().__init__(path, part, kept_bytes)

    def commit(self) -> None:
        """Make everything written so far durable."""
        with self.all_or_nothing():
            self.sync()
            if not self._committed:
                atomic_files.sync_folder(self.path.parent)
        self._committed = True

    def end(self, write_end: Callable[[], None]) -> None:
        """Write the end of the contents and finish; give up if no commit refers to the file, do nothing if closed."""
        if self.closed:
            return
        if self.is_forked:  # the other process continues to write it
            self.abandon()
            return
        if self.is_new and self._is_committed is not None and not self._is_committed():
            self.give_up()
            return
        with self.all_or_nothing():
            write_end()
        self.finish()

    def give_up(self) -> None:
        """Close without a name. A part that a failed commit may still refer to stays as ``.FILE.part``."""
        self.abandon()
        if not self._committed and not self.is_forked:
            atomic_files.discard(self.part)


def part_of(path: Path) -> Path:
    """Return the path of a file while it grows."""
    return path.with_name(f".{path.name}.part")


def check_new(path: Path) -> None:
    """Raise UsageError if the file exists: it may be the only copy of its rows."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: exists; it is never written over: move it, or give another name")


def existing_path(path: Path) -> Path:
    """Return the path of a file of another run: ``.FILE.part`` if that exists, where FILE must not, else FILE."""
    part = part_of(path)
    if not part.exists():
        return path
    check_new(path)
    return part
