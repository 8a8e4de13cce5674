"""The errors that penstock raises on purpose. Each is also a builtin error; no other module defines a public one."""

from __future__ import annotations

import concurrent.futures
import difflib
import re
from collections.abc import Iterable

# The public ones, as ``penstock.errors`` has them.
__all__ = [
    "CancelledError",
    "CapacityError",
    "ConfigError",
    "DeltasGoneError",
    "InputError",
    "PeerError",
    "PenstockError",
    "ReadTimeoutError",
    "ServiceError",
    "ServiceTimeoutError",
    "StateError",
    "TakeTimeoutError",
    "TruncatedInputError",
    "UsageError",
    "UsageTypeError",
]

# Longest text in a message, in characters: a name in a damaged file may have megabytes.
_MOST_SAID = 2000
# Characters of a name that is compared with others.
_MOST_COMPARED = 1024
# Most tables that a message lists by name.
MOST_LISTED = 10
# Not the form of a URI in advice.
_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?!USER:PASSWORD@)[^/\s'\"]*@")
_OPTION = re.compile(r"([?&])([\w.-]+)=([^&#\s'\"]+)")
_SECRET = re.compile(
    r"passw|passphrase|pwd|secret|token|credential|signature|(access|api|account|private)[_.-]?key"
    r"|^(sas|sig|auth|key|pass|pw)$",
    re.IGNORECASE,
)


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose. Each is also a builtin error.

    Parameters
    ----------
    *arguments : object
        Arguments of the builtin error. Texts lose the keys and passwords of URIs in them.

    Examples
    --------
    >>> import penstock as ps
    >>> try:
    ...     ps.EmbeddingConfig.load("missing.pbtxt")
    ... except ps.PenstockError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    ConfigError True
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(without_credentials(text) if isinstance(text, str) else text for text in arguments))


def without_credentials(text: str) -> str:
    """Return a text without the keys and passwords that URIs in it have before their host, and in their options."""
    return _CREDENTIALS.sub(r"\1", _OPTION.sub(_without_secret, text))


def _without_secret(option: re.Match[str]) -> str:
    mark, name, value = option.groups()
    after = value[len(value.rstrip(":;,.)]")) :]  # of the sentence
    return f"{mark}{name}=…{after}" if _SECRET.search(name) else option[0]


class ConfigError(PenstockError, ValueError):
    """The configuration is invalid, or requests something that this version cannot run."""


class UsageError(PenstockError, ValueError):
    """An argument is wrong: a value out of range, or options that exclude each other."""


class UsageTypeError(UsageError, TypeError):
    """An argument has the wrong type, where TensorFlow raises TypeError; also a ValueError, as every UsageError is."""


class StateError(PenstockError, RuntimeError):
    """Saved or live state is corrupt or does not match: wrong tables, wrong shapes, an engine that failed mid-step."""


class CommitGoneError(StateError):
    """A commit was removed while it was read: a run that commits there keeps only its last few."""


class DeltasGoneError(StateError):
    """The requested deltas are no longer kept, or belong to another state: fetch the tables again."""


class ServiceError(PenstockError, ConnectionError):
    """A Flight service cannot be reached, refuses the caller, or is full or shutting down: retry, or use another."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """A wait for a Flight service ended at its limit; the message says what it waited for.

    Examples
    --------
    >>> import penstock as ps
    >>> issubclass(ps.ServiceTimeoutError, TimeoutError)
    True
    """


class ListenError(PenstockError, OSError):
    """A service cannot listen at its address."""


class TargetError(PenstockError, ConnectionError):
    """A store that rows are written to cannot be reached, is full or fails: retry, or use another."""


class InputError(PenstockError, ValueError):
    """The input is invalid. The message is one line; the attributes contain its parts.

    Parameters
    ----------
    problem : str
        The expected value, and the actual one.
    source : str or None
        The source (a path, a URI, ``<stdin>``).
    batch : int or None
        Index of the record batch in the source, from 0.
    row : int or None
        Index of the row in that batch (in the file, for Parquet), from 0.
    column : str or None
        The column's name in the source.
    reason : str or None
        For a bad row one of the reasons that ``on_bad_row`` counts.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, optimizer=ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> try:
    ...     engine.apply({"user": ([5, 9], [[1.0, 2.0], [3.0, 4.0]])})
    ... except ps.InputError as error:
    ...     print(error.row, error.column, error.reason)
    1 id id_out_of_range
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
        text = without_credentials(": ".join(p for p in (source, place, problem) if p))
        if reason is not None:
            text += f" [{reason}]"
        super().__init__(" ".join(text.split()))


def short(text: str) -> str:
    """Return a text, without its middle if it is longer than 2000 characters."""
    if len(text) <= _MOST_SAID:
        return text
    half = _MOST_SAID // 2
    return f"{text[:half]} … ({len(text) - 2 * half:,} more characters) … {text[-half:]}"


def close_names(name: str, candidates: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the candidates that resemble a name, at most so many, the closest first; none for a name that is long.

    The comparison takes some 40 times the memory of the name, which may come from a hostile stream.
    """
    return difflib.get_close_matches(name, list(candidates), most, cutoff) if len(name) <= _MOST_COMPARED else []


def listed(names: Iterable[str]) -> str:
    """Return ``user, item``; of more than ten names the first ten and the number of the others."""
    names = list(names)
    more = [f"… {len(names) - MOST_LISTED:,} more"] if len(names) > MOST_LISTED else []
    return ", ".join([*names[:MOST_LISTED], *more])


def unreleased(place: object, advice: str) -> StateError:
    """Return the error of a file in a format from before the first release. advice : what to do"""
    return StateError(f"{place}: written by an unreleased earlier version of penstock, which is not read; {advice}")


class TruncatedInputError(InputError, EOFError):
    """The input is truncated: it has no end marker, or ends inside a message."""


class StaleInputError(InputError):
    """More of the input was stale than ``max_stale`` allows. It was read to its end; what was applied stays applied."""


class TakeTimeoutError(PenstockError, TimeoutError):
    """A take waited for its whole timeout. It consumed nothing; the message says what it waited for."""


class ReadTimeoutError(PenstockError, TimeoutError):
    """Rows could not be read in time: steps of their writer left no time for rows of one step, or it has stopped.

    Examples
    --------
    >>> import penstock as ps
    >>> issubclass(ps.ReadTimeoutError, TimeoutError)
    True
    """


class CancelledError(PenstockError, concurrent.futures.CancelledError):
    """The accumulator was closed before the call, or while a take waited."""


class CapacityError(PenstockError, RuntimeError):
    """There is no room: in a dynamic table for new keys, or on this machine for the passes of a replay.

    If it is the table, the step was not taken: its frames stay in the gate, which admits no other one before it opens.
    """


class PeerError(PenstockError, ConnectionError):
    """Another process of the same job has exited, cannot be reached, or is at another point of the run."""
