"""What a format of tables with versions can do: list its versions, and open the files that each of them appended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import penstock.base.interrupts as interrupts
import penstock.io.proxies as proxies
from penstock.base.errors import InputError, PenstockError, StateError, without_credentials
from penstock.io.error_tables import INPUT, MISSING, OBJECT_STORES, UNREACHABLE, ErrorTable, text_of
from penstock.io.sources.batch import Part

# Of tables on a server. On this machine, every error of the library is bad input.
ERRORS = ErrorTable(*OBJECT_STORES, MISSING, UNREACHABLE, uses_proxies=True)


class RowFile(NamedTuple):
    """A file of rows. num_rows : None: unknown; open : opens it; the stack closes what is open"""

    num_rows: int | None
    open: Callable[[ExitStack], Part]


class TableVersions(ABC):
    """The versions of one table.

    name : its spelling, for messages and in checkpoints; first : the number of its first version
    is_remote : whether a server has it; errors : what those of the library mean

    Methods raise OSError if the server cannot be reached, and may then be called again; InputError if the table cannot
    be read, UsageError if the server refuses the caller, StateError if a version is no longer there.
    """

    first = 0
    errors = ERRORS

    def __init__(self, name: str, is_remote: bool) -> None:
        self.name, self.is_remote = without_credentials(name), is_remote
        proxies.exempt_loopback()

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
        """Convert the errors of a library, as the table says."""
        try:
            yield
        except PenstockError:
            raise
        except kinds as error:
            interrupts.check()
            row = self.errors.row(error)
            if not self.is_remote or (row is not None and row.code == INPUT):
                raise self.unreadable(text_of(error)) from error
            raise self.errors.converted(error, self.name, OSError) from error

    def unreadable(self, problem: object) -> InputError:
        """Return the error of a table that cannot be read."""
        return InputError(f"the table cannot be read: {problem}", source=self.name)


# Of Delta Lake's object stores: a request ends after 30 s, and the library repeats those that fail sooner. Its default,
# 180 s of repetitions, is a silence that neither patience nor a signal ends.
STORE_OPTIONS = {"retry_timeout": "20s"}


def store_options(uri: str) -> dict[str, str] | None:
    """Return Delta Lake's options of the store that has a table; None: this machine has it."""
    return dict(STORE_OPTIONS) if is_remote(uri) else None


def is_remote(uri: str) -> bool:
    """Return whether a URI names a server rather than files of this machine."""
    return "://" in uri and not uri.startswith("file://")
