"""A target that is a Python function, called with each delta and its number (docs/follow.md).

A file has the position that was left there, and is locked and compared. What the function writes is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path

import pyarrow as pa

import penstock.base.forks as forks
from penstock.base.errors import PenstockError, StateError, TargetError, UsageError, short
from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.state_files import read_json
from penstock.serving.followers.row_table import blocks_of, row_schema, row_table
from penstock.serving.followers.target import (
    FILE_ERRORS,
    FollowedJob,
    Stored,
    TableRows,
    Target,
    failures,
    locked,
)
from penstock.serving.followers.target_kinds import TargetKind

TARGET = TargetKind(
    title="A Python function",
    form="module:function",
    needs_state=True,
    example="cache:update",
    errors=FILE_ERRORS,
    holds="whatever the function does",
    transaction="one call per delta",
    open=lambda name, state: PythonFunction(name, state),
)
Function = Callable[[pa.RecordBatch, int], object]

# Key in the metadata of the schema of the empty batch that precedes all rows of the tables.
FULL_COPY = b"penstock.full_copy"


class PythonFunction(Target):
    """``module:function``. The number of the last delta that it returned from is in a file.

    The function gets batches with the columns ``table``, ``id`` and ``row``, which is null where an id was removed.
    An exception of the function is a failure of the target: the call is repeated.
    """

    per_delta = True

    def __init__(self, name: str, state: str | os.PathLike[str]) -> None:
        super().__init__(name)
        self._function, self._state = _load(name), Path(state)

    def failures(self) -> AbstractContextManager[None]:
        return failures(str(self._state), FILE_ERRORS)

    def stored(self) -> Stored | None:
        try:
            return Stored.decoded(read_json(self._state), str(self._state))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise StateError(f"{self._state}: not a file that penstock follow --state wrote; use another") from None

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        step = new.version.step
        with self._compared(before):
            self._state.unlink(missing_ok=True)
            first = _batch([], new.job)
            self._call(first.replace_schema_metadata({**(first.schema.metadata or {}), FULL_COPY: b"true"}), step)
            for rows in tables:
                for part in blocks_of(rows):
                    self._call(_batch([part], new.job), step)
            self._keep(new)

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        with self._compared(before):
            self._call(_batch(changes, new.job), new.version.step)
            self._keep(new)

    @contextmanager
    def _compared(self, before: Stored | None) -> Iterator[None]:
        """Hold the lock of the state in the block, compared."""
        with locked(self._state.with_name(f"{self._state.name}.lock")):
            self.compare(self.stored(), before)
            yield

    def _call(self, batch: pa.RecordBatch, step: int) -> None:
        process = forks.this_process
        try:
            self._function(batch, step)
        except PenstockError:
            raise
        except Exception as error:
            forks.check(process, self.name)
            text = " ".join(str(error).split())
            raise TargetError(f"{self.name}: step {step}: {type(error).__name__}: {short(text)}") from error
        forks.check(process, self.name)

    def _keep(self, stored: Stored) -> None:
        with atomic_files.publishing(self._state) as file:
            file.write(json.dumps(stored.encoded()).encode())


def _load(name: str) -> Function:
    """Import a function. The working directory is on the path, as for ``python -m``."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name}: {error}; expected module:function") from error
    if not callable(value):
        raise UsageError(f"{name}: expected a function, got {type(value).__name__}")
    function: Function = value
    return function


def _batch(tables: Sequence[TableRows], job: FollowedJob) -> pa.RecordBatch:
    schema = row_schema(job, job.id_column_type(), fixed=False)
    whole = row_table(tables, schema, with_removed=True).combine_chunks()
    return next(iter(whole.to_batches()), pa.RecordBatch.from_pylist([], schema))
