"""Sources that continue after any frame without reading those before it: topics, and tables with versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from penstock.base.errors import UsageError
from penstock.io.registry import either
from penstock.io.sources.batch import Source
from penstock.io.sources.source_kinds import source_kinds
from penstock.model.frames import FrameRun, Position

if TYPE_CHECKING:
    from penstock.io.decoding.read_options import ReadOptions

GROWS = "a topic or a table that grows"


class SeekableSource(Source, ABC):
    """A source that grows, and whose frames have a ``position`` after which it continues.

    Each reading ends where the source ends at its start, and the next one continues there.

    name : in checkpoints, and therefore without hosts
    pause_s : between two checks for more, where a run follows it and nothing arrives; shortest_pause_s : the first ones
    """

    shortest_pause_s = pause_s = 0.2

    @property
    @abstractmethod
    def creation(self) -> str | None:
        """What tells the source from one of its name that was created later; None: nothing, or it was not read yet."""

    @abstractmethod
    def seek(self, position: Position, creation: str | None = None) -> None:
        """Continue after a position; (): begin with the oldest frame.

        creation : of the source that the position is of; None: unknown. Reading raises StateError if it is another
        """

    @abstractmethod
    def fix_end(self) -> None:
        """Let the next reading end where the source ends now."""

    def frames(self, options: ReadOptions, first_bad: dict[str, str]) -> Generator[FrameRun, None, None] | None:
        """Return the frames of a reading; None: its parts have them. first_bad : see FrameReader"""
        return None

    def acknowledge(self, position: Position) -> None:
        """Report that the frames up to a position are durable. For display only: nothing depends on its success."""

    def close(self) -> None:
        """Close the connection; the next method opens another one."""


def created_again(place: str, kind: str, expected: str, got: str | None) -> str:
    """Return the problem of a source that is another one than that of the position. place : the next one"""
    return (
        f"{place} is next, and the {kind} was deleted and created again (expected {expected}, got {got}); use another "
        f"checkpoint, or the former {kind}"
    )


def check_order(sources: Sequence[Source], merge: str | None, follow: bool) -> None:
    """Raise UsageError if these sources cannot be read together, so that a resumed run continues each of them."""
    seekable = [isinstance(source, SeekableSource) for source in sources]
    if follow and not any(seekable):
        schemes = either(kind.schemes[0] for kind in source_kinds() if kind.grows)
        raise UsageError(f"--follow: {sources[0].name} does not grow; expected {schemes}")
    if not any(seekable) or all(seekable):
        return
    if merge is not None:
        name = sources[seekable.index(True)].name
        raise UsageError(f"--merge {merge}: {name} cannot be merged with files; replay the files first, then {name}")
    if seekable != sorted(seekable):
        last = len(seekable) - 1 - seekable[::-1].index(False)
        raise UsageError(f"{sources[last].name}: give files before topics and tables with versions")
