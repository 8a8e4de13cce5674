"""The errors penstock raises on purpose. Each is also a builtin kind; no other module defines one."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable

# A name of megabytes in a damaged file is no name, and a message is to be read.
_MOST_SAID = 2000
# Tables that a person is shown, one by one.
MOST_LISTED = 10


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """The configuration is wrong, or asks for something that this version cannot run."""


class UsageError(PenstockError, ValueError):
    """An argument is wrong: a value out of range, or options that exclude each other."""


class UsageTypeError(UsageError, TypeError):
    """An argument is of the wrong type, where TensorFlow says TypeError; a ValueError too, as every wrong one is."""


class StateError(PenstockError, RuntimeError):
    """Saved or live state is corrupt or does not fit: wrong tables, wrong shapes, an engine that failed mid-step."""


class CommitGoneError(StateError):
    """A commit was removed while it was read: a run that commits there keeps only its last few."""


class DeltasGoneError(StateError):
    """The deltas asked for are no longer kept, or are of another state: take the tables anew."""


class ServiceError(PenstockError, ConnectionError):
    """A Flight service cannot be reached, refuses the caller, or is full or ending: try again, or elsewhere."""


class InputError(PenstockError, ValueError):
    """The input is wrong. The message is one line; what it is made of can be read from the attributes.

    source : str or None, which source (a path, a URI, ``<stdin>``)
    batch : int or None, index of the record batch in the source, from 0
    row : int or None, index of the row in that batch (in the file, for Parquet), from 0
    column : str or None, the column's name in the source
    reason : str or None, for a bad row one of the reasons that ``on_bad_row`` counts
    """

    def __init__(
        self,
        problem: str,
        *,
        source: str | None = None,
        batch: int | None = None,
        row: int | None = None,
        column: str | None = None,
        reason: str | None = None,
    ) -> None:
        problem, column = short(problem), None if column is None else short(column)
        self.problem = problem
        self.source, self.batch, self.row, self.column, self.reason = source, batch, row, column, reason
        places = [
            f"batch {batch}" if batch is not None else "",
            f"row {row}" if row is not None else "",
            f"column '{column}'" if column is not None else "",
        ]
        place = ", ".join(p for p in places if p)
        text = ": ".join(p for p in (source, place, problem) if p)
        if reason is not None:
            text += f" [{reason}]"
        super().__init__(" ".join(text.split()))


def short(text: str) -> str:
    """A text without its middle, where it is longer than anybody reads."""
    if len(text) <= _MOST_SAID:
        return text
    half = _MOST_SAID // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} more characters) … {text[-half:]}"


def listed(names: Iterable[str]) -> str:
    """``user, item``; of many the first ten, and how many more there are."""
    names = list(names)
    more = [f"… {len(names) - MOST_LISTED:,} more"] if len(names) > MOST_LISTED else []
    return ", ".join([*names[:MOST_LISTED], *more])


class TruncatedInputError(InputError, EOFError):
    """The input stops before its end: no end marker, or a message cut in two."""


class StaleInputError(InputError):
    """More of the input was stale than ``max_stale`` allows. It was read to its end; what was applied stays applied."""


class TakeTimeoutError(PenstockError, TimeoutError):
    """A take waited as long as it was told to. It consumed nothing; the message says what it waited for."""


class CancelledError(PenstockError, concurrent.futures.CancelledError):
    """The accumulator was closed, while a take waited or before the call."""


class PeerError(PenstockError, ConnectionError):
    """Another process of the same job is gone, cannot be reached, or is somewhere else in the work."""
