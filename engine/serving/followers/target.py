"""What every target of ``penstock follow`` can do, and what it stores besides rows: whose rows they are, and when.

A target replaces all of its rows, or applies deltas to them, in one transaction that also stores the job, the epoch and
the step. After a kill it therefore holds either state, and names which. The same transaction compares what the target
stores with what the follower left there, so that two followers, or one and a backup, never mix their rows.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import penstock.base.forks as forks
from penstock.base.errors import (
    PenstockError,
    StateError,
    TargetError,
    UsageError,
    listed,
    unreleased,
    without_credentials,
)
from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.state_files import parsed_json
from penstock.io.error_tables import FILES, ErrorTable
from penstock.model.frames import Array
from penstock.model.row_encodings import FLOAT32, RowEncoding, encoding_of
from penstock.model.version import Version
from penstock.rows.initializers import InitialRows
from penstock.serving.flight import Client

# The key and the number of the format of what targets store, of encoded rows another number, which earlier versions
# refuse; and the key of versions that were never released.
KEY, FORMAT, ENCODED_FORMAT, UNRELEASED_KEY = "penstock.target", 1, 2, "format"


class TableForm(NamedTuple):
    """The form of a table. key_type : "int64" or "uint64" of a dynamic table; None: ids are 0, 1, 2, …"""

    dim: int
    key_type: str | None = None

    @property
    def id_type(self) -> str:
        return self.key_type or "int64"


@dataclass(frozen=True)
class FollowedJob:
    """Identifies the origin of rows. lineage : of the history of steps; tables : in the configuration's order

    absent : table → what keys without a row read, as the service describes it; targets need not store it
    rows : how the rows are stored
    """

    lineage: str
    tables: Mapping[str, TableForm]
    absent: Mapping[str, InitialRows] = field(default_factory=dict, compare=False)
    rows: RowEncoding = FLOAT32

    @classmethod
    def of(cls, client: Client, rows: RowEncoding = FLOAT32) -> FollowedJob:
        """Return the job of a service. Raises ServiceError."""
        lineage, tables, absent = client.status().version.lineage, {}, {}
        for name, schema in client.tables().items():
            metadata = schema.metadata or {}
            key_type = metadata.get(b"penstock.key_type")
            tables[name] = TableForm(schema.field("row").type.list_size, key_type and key_type.decode())
            if b"penstock.absent" in metadata:
                absent[name] = InitialRows(*json.loads(metadata[b"penstock.absent"]))
        return cls(lineage, tables, absent, rows)

    def encoded(self) -> str:
        head = {KEY: FORMAT} if self.rows is FLOAT32 else {KEY: ENCODED_FORMAT, "rows": self.rows.name}
        tables = {name: list(form) for name, form in self.tables.items()}
        return json.dumps({**head, "lineage": self.lineage, "tables": tables}, separators=(",", ":"))

    @classmethod
    def decoded(cls, text: str | bytes, place: str) -> FollowedJob:
        """Parse what ``encoded`` returned. Raises StateError."""
        try:
            fields = parsed_json(text)
            if UNRELEASED_KEY in fields:
                raise unreleased(place, "follow into another target")
            if fields[KEY] in (FORMAT, ENCODED_FORMAT):
                rows = encoding_of(fields["rows"]) if fields[KEY] == ENCODED_FORMAT else FLOAT32
                tables = {name: TableForm(*form) for name, form in fields["tables"].items()}
                return cls(fields["lineage"], tables, rows=rows)
        except UsageError as error:
            raise StateError(f"{place}: {error}; use another target") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            fields = {}
        got = fields.get(KEY, "damaged")
        known = f"{FORMAT} or {ENCODED_FORMAT}"
        raise StateError(f"{place}: expected what penstock stores in format {known}, got {got}; use another target")

    def check(self, stored: FollowedJob, place: str) -> None:
        """Raise StateError if a target holds rows of another job. The tables of one job may have changed since."""
        if self.lineage == stored.lineage:
            return
        if self.tables != stored.tables:
            held = f"tables {listed(stored.tables)}" if self.tables.keys() != stored.tables.keys() else "other dims"
            problem = f"it holds {held}, the service has {listed(self.tables)}"
        else:
            problem = (
                f"it holds the tables of another job or history ({stored.lineage}; the service has {self.lineage}, "
                "a new one after each start without its checkpoint)"
            )
        raise StateError(f"{place}: {problem}; use another target, or --replace to overwrite it")

    def id_column_type(self) -> pa.DataType:
        """Return the type of a column with the ids of all tables: of int64 ids, uint64 holds the same bits."""
        return pa.uint64() if any(form.id_type == "uint64" for form in self.tables.values()) else pa.int64()


@dataclass(frozen=True)
class Stored:
    """What a target holds: the rows of a job at a version.

    Parameters
    ----------
    job : FollowedJob
        The lineage and the tables of the service.
    version : Version
        Of the rows.
    """

    job: FollowedJob
    version: Version

    def encoded(self) -> dict[str, Any]:
        return {"job": json.loads(self.job.encoded()), "epoch": self.version.epoch, "step": self.version.step}

    def texts(self) -> dict[str, str]:
        """Return it as texts by name, which ``decoded`` takes too."""
        return {"job": self.job.encoded(), "epoch": self.version.epoch, "step": str(self.version.step)}

    @classmethod
    def decoded(cls, fields: Mapping[str, Any], place: str) -> Stored:
        """Parse what ``encoded`` returned, or the job as text.

        Parameters
        ----------
        fields : mapping
            The job, the epoch and the step.
        place : str
            For messages.

        Returns
        -------
        Stored

        Raises
        ------
        StateError, ValueError, KeyError, TypeError
            If the fields are damaged.
        """
        job = fields["job"]
        job = FollowedJob.decoded(json.dumps(job) if isinstance(job, dict) else job, place)
        return cls(job, Version.of(job.lineage, str(fields["epoch"]), int(fields["step"])))

    def is_ahead_of(self, other: Stored, epochs: Sequence[str]) -> bool:
        """Return whether another follower wrote this after another version.

        Parameters
        ----------
        other : Stored
            What precedes it in its history is an earlier state of the target. Everything else is not.
        epochs : sequence of str
            Up to that of ``other``, in order.

        Returns
        -------
        bool
        """
        epoch, last = self.version.epoch, other.version.epoch
        if self.job.lineage != other.job.lineage:
            return True
        if epoch == last:
            return self.version.follows(other.version)
        return epoch not in epochs or last not in epochs or epochs.index(epoch) > epochs.index(last)


class MovedError(PenstockError):
    """A target does not hold what the follower left there. stored : what it holds; None: it is empty"""

    def __init__(self, stored: Stored | None) -> None:
        super().__init__(f"expected other rows, found {stored}")
        self.stored = stored


class TableRows(NamedTuple):
    """Rows of one table.

    Attributes
    ----------
    table : str
        Its name.
    ids : numpy.ndarray
        int64 or uint64, shape (n,), distinct.
    rows : numpy.ndarray
        float32, shape (n, dim); of encoded rows their bytes, uint8, shape (n, bytes).
    removed : numpy.ndarray
        Ids without a row.
    """

    table: str
    ids: Array
    rows: Array
    removed: Array

    @property
    def little_endian(self) -> Array:
        """The rows as bytes of any machine mean them."""
        return self.rows.astype(self.rows.dtype.newbyteorder("<"), copy=False)


class Target(ABC):
    """A store that a follower writes to. A subclass implements ``stored``, ``replace`` and ``apply``.

    Parameters
    ----------
    name : str
        For messages, without credentials.

    Attributes
    ----------
    connect_s : float
        How long an attempt to connect may take. A follower sets it to its patience, if that is shorter.
    per_delta : bool
        Whether each delta is a transaction; else consecutive ones are applied together.
    takes_encoded : bool
        Whether rows may be encoded (``Follower(rows=)``).
    frame_time : int or None
        The largest time of the frames in the rows that come next, in seconds. A follower sets it; None: unknown.

    Notes
    -----
    If the store is unreachable, full or failing, methods may be called again: ``failures`` makes TargetError of what
    they raise then.
    """

    connect_s = 5.0
    per_delta = False
    takes_encoded = True
    frame_time: int | None = None

    def __init__(self, name: str) -> None:
        self.name = without_credentials(name)

    @abstractmethod
    def stored(self) -> Stored | None:
        """Return what the target holds. It is called whenever there is nothing to apply, so it reads no rows.

        Returns
        -------
        Stored or None
            None if the target is empty.

        Raises
        ------
        StateError
            If the target holds something else.
        """

    @abstractmethod
    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        """Replace all rows, in one transaction.

        Parameters
        ----------
        new : Stored
            What the target holds afterwards.
        tables : sequence of TableRows
            All rows of all tables.
        before : Stored or None
            What the target holds now.

        Raises
        ------
        MovedError
            If the target holds something else than ``before``.
        """

    @abstractmethod
    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        """Apply the changes between two versions, in one transaction.

        Parameters
        ----------
        new : Stored
            What the target holds afterwards.
        changes : sequence of TableRows
            Of one or several deltas: each id once, with its last value.
        before : Stored
            What the target holds now.

        Raises
        ------
        MovedError
            If the target holds something else than ``before``.
        """

    def failures(self) -> AbstractContextManager[None]:
        """Convert errors of the store in the block. Followers call the methods above in it.

        Returns
        -------
        context manager
            Raises TargetError for what is retried, UsageError and StateError for what no retry helps.
        """
        return failures(self.name, FILE_ERRORS)

    def compare(self, stored: Stored | None, before: Stored | None) -> None:
        """Raise MovedError unless the target holds what the follower left. Call it in the transaction that writes.

        Parameters
        ----------
        stored : Stored or None
            What the target holds.
        before : Stored or None
            What the follower left there.

        Raises
        ------
        MovedError
            If they differ.
        """
        if stored != before:
            raise MovedError(stored)

    def close(self) -> None:  # noqa: B027 (not every target keeps something open)
        """Close connections and files; the next method opens them again."""


FILE_ERRORS = ErrorTable(*FILES)


@contextmanager
def failures(name: str, errors: ErrorTable, *kinds: type[BaseException]) -> Iterator[None]:
    """Convert OSError and the given errors in the block, as their table says."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, *kinds)):
            raise
        raise errors.converted(error, name, lambda text: TargetError(f"{name}: {text}")) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the block, which is created. Raises TargetError if another process holds it."""
    while True:
        try:
            file = atomic_files.lock(path)
        except BlockingIOError as error:
            raise TargetError(f"{path}: another process is writing there ({error.strerror})") from None
        try:
            if os.path.samestat(os.fstat(file), path.stat()):  # else the file was replaced
                yield
                return
        finally:
            forks.close(file)
