"""What every target of ``penstock follow`` can do, and what it stores besides rows: whose rows they are, and a step.

A target replaces all of its rows, or applies deltas to them, in one transaction that also stores the step. After a
kill it therefore holds either state, and names which.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import PenstockError, StateError, TargetError, listed, short
from penstock.filesystem.state_files import parsed_json
from penstock.io.flight import Client, Delta

Float32 = npt.NDArray[np.float32]

# The version of what targets store.
FORMAT = 1


class TableForm(NamedTuple):
    """The form of a table. key_type : "int64" or "uint64" of a dynamic table; None: ids are 0, 1, 2, …"""

    dim: int
    key_type: str | None = None

    @property
    def id_type(self) -> str:
        return self.key_type or "int64"


@dataclass(frozen=True)
class Job:
    """Identifies the origin of rows. lineage : of the history of steps; tables : in the configuration's order"""

    lineage: str
    tables: Mapping[str, TableForm]

    @classmethod
    def of(cls, client: Client) -> Job:
        """Return the job of a service. Raises ServiceError."""
        tables = {}
        for name, schema in client.tables().items():
            key_type = (schema.metadata or {}).get(b"penstock.key_type")
            tables[name] = TableForm(schema.field("row").type.list_size, key_type and key_type.decode())
        return cls(client.status()["lineage"], tables)

    def encoded(self) -> str:
        tables = {name: list(form) for name, form in self.tables.items()}
        return json.dumps({"format": FORMAT, "lineage": self.lineage, "tables": tables}, separators=(",", ":"))

    @classmethod
    def decoded(cls, text: str | bytes, where: str) -> Job:
        """Parse what ``encoded`` returned. Raises StateError."""
        try:
            fields = parsed_json(text)
            if fields["format"] == FORMAT:
                return cls(fields["lineage"], {name: TableForm(*form) for name, form in fields["tables"].items()})
        except (ValueError, TypeError, KeyError, AttributeError):
            fields = {}
        found = fields.get("format", "damaged")
        raise StateError(f"{where}: expected what penstock stores in format {FORMAT}, got {found}; use another target")

    def check(self, stored: Job, where: str) -> None:
        """Raise StateError if a target holds rows of another job."""
        if self.tables != stored.tables:
            held = f"tables {listed(stored.tables)}" if self.tables.keys() != stored.tables.keys() else "other dims"
            problem = f"it holds {held}, the service has {listed(self.tables)}"
        elif self.lineage != stored.lineage:
            problem = (
                f"it holds the tables of another job or history ({stored.lineage}; the service has {self.lineage}, "
                "a new one after each start without its checkpoint)"
            )
        else:
            return
        raise StateError(f"{where}: {problem}; use another target, or --replace to overwrite it")

    def id_column_type(self) -> pa.DataType:
        """Return the type of a column with the ids of all tables: of int64 ids, uint64 holds the same bits."""
        return pa.uint64() if any(form.id_type == "uint64" for form in self.tables.values()) else pa.int64()


class Stored(NamedTuple):
    """What a target holds. step : that its rows have the values of"""

    job: Job
    step: int


class TableRows(NamedTuple):
    """Rows of one table. ids : int64 or uint64 (n,), distinct; rows : float32 (n, dim); removed : ids without a row"""

    table: str
    ids: npt.NDArray[Any]
    rows: Float32
    removed: npt.NDArray[Any]


class Target(ABC):
    """A store. Methods raise TargetError if it is unreachable, full or failing, and may be called again then.

    name : for messages; interval_s : default seconds between two transactions
    """

    interval_s = 0.2

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def stored(self) -> Stored | None:
        """Return what the target holds; None if it is empty. Raises StateError if it holds something else."""

    @abstractmethod
    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        """Replace all rows, in one transaction."""

    @abstractmethod
    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        """Apply deltas, the last of which has the number ``step``, in one transaction. They may have been applied."""

    def close(self) -> None:  # noqa: B027 (not every target keeps something open)
        """Close connections and files; the next method opens them again."""


@contextmanager
def failures(name: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Convert OSError and the given errors in the block to TargetError."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, *kinds)):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise TargetError(f"{name}: {short(text)}") from error
