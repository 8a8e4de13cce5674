"""What a format of tables with versions can do: list its versions, and open the files that each of them appended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import penstock.interrupts as interrupts
from penstock.errors import InputError, PenstockError, StateError
from penstock.io.sources.batch import Part


class RowFile(NamedTuple):
    """A file of rows. num_rows : None: unknown; open : opens it; the stack closes what is open"""

    num_rows: int | None
    open: Callable[[ExitStack], Part]


class TableVersions(ABC):
    """The versions of one table.

    name : its spelling, for messages and in checkpoints; first : the number of its first version

    Methods raise InputError if the table cannot be read, StateError if a version is no longer there.
    """

    first = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def latest(self) -> int:
        """Return the number of the newest version."""

    @abstractmethod
    def numbers(self, first: int, last: int) -> Sequence[int]:
        """Return the numbers of the versions from ``first`` to ``last``, ascending."""

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

    def gone(self, version: int) -> StateError:
        """Return the error of a version that was removed."""
        return StateError(
            f"{self.name}: version {version} is next, and it is no longer there; keep versions for longer, and start "
            "again from an older checkpoint and another copy of the rows"
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
            raise InputError(f"the table cannot be read: {lines[0]}", source=self.name) from error
