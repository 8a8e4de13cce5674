"""What a format of tables with versions can do: list its versions, and open the files that each of them appended."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import penstock.interrupts as interrupts
from penstock.errors import InputError, PenstockError, StateError, UsageError, short
from penstock.io.sources.batch import Part

# What servers and libraries say, for want of classes: the caller may not, or what is named does not exist.
_REFUSED = re.compile(
    r"access.?denied|forbidden|unauthori[sz]ed|InvalidAccessKeyId|SignatureDoesNotMatch|\b40[13]\b", re.I
)
_MISSING = re.compile(r"not.?found|no such|does not exist|not a delta table|\b404\b", re.I)


class RowFile(NamedTuple):
    """A file of rows. num_rows : None: unknown; open : opens it; the stack closes what is open"""

    num_rows: int | None
    open: Callable[[ExitStack], Part]


class TableVersions(ABC):
    """The versions of one table.

    name : its spelling, for messages and in checkpoints; first : the number of its first version
    is_remote : whether a server has it

    Methods raise OSError if the server cannot be reached, and may then be called again; InputError if the table cannot
    be read, UsageError if the server refuses the caller, StateError if a version is no longer there.
    """

    first = 0

    def __init__(self, name: str, is_remote: bool) -> None:
        self.name, self.is_remote = name, is_remote

    @abstractmethod
    def latest(self) -> int:
        """Return the number of the newest version."""

    @abstractmethod
    def creation(self) -> str | None:
        """Return what tells the table that ``latest`` read last from one created later in its place; None: nothing."""

    def is_of(self, creation: str) -> bool:
        """Return whether the table that ``latest`` read last may be the one that an earlier ``creation`` named."""
        return creation == self.creation()

    def check_applied(self, version: int) -> None:  # noqa: B027 (most formats refuse the version that takes it back)
        """Raise StateError if the table that ``latest`` read last was set back to before a version."""

    def numbers(self, first: int, last: int) -> Sequence[int]:
        """Return the numbers of the versions from ``first`` to ``last``, ascending."""
        return range(first, last + 1)

    @abstractmethod
    def files(self, version: int) -> Sequence[RowFile]:
        """Return the files that a version appended, in order; none if it only rearranged rows.

        Raises InputError if it removed or changed rows.
        """

    def changed(self, version: int, how: str) -> InputError:
        """Return the error of a version that does not only append. how : what it did"""
        return InputError(
            f"version {version} is {how}: a gradient that was applied cannot be taken back; expected versions that "
            "append rows, or compact them",
            source=self.name,
        )

    def removal_error(self, version: int, file: str | None = None) -> StateError:
        """Return the error of a version that was removed. file : of the version; None: all of it"""
        subject = "it" if file is None else f"its file {file}"
        return StateError(
            f"{self.name}: version {version} is next, and {subject} is no longer there; keep versions for longer, and "
            "start again from an older checkpoint and another copy of the rows"
        )

    @contextmanager
    def failures(self, *kinds: type[Exception]) -> Iterator[None]:
        """Convert the errors of a library, with their first line."""
        try:
            yield
        except PenstockError:
            raise
        except kinds as error:
            interrupts.check()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            text = f"{type(error).__name__}: {error}"
            if self.is_remote and _REFUSED.search(text):
                raise UsageError(f"{self.name}: {short(lines[0])}; check the credentials in the environment") from error
            if self._is_gone(error) and not _MISSING.search(text):
                raise OSError(lines[0]) from error
            raise self.unreadable(lines[0]) from error

    def _is_gone(self, error: Exception) -> bool:
        """Return whether an error may be that of a server that is gone for a while."""
        return self.is_remote

    def unreadable(self, problem: object) -> InputError:
        """Return the error of a table that cannot be read."""
        return InputError(f"the table cannot be read: {problem}", source=self.name)


def is_remote(uri: str) -> bool:
    """Return whether a URI names a server rather than files of this machine."""
    return "://" in uri and not uri.startswith("file://")
