"""A target that is a Python function, called with each delta and its number (docs/follow.md)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pyarrow as pa

from penstock.errors import PenstockError, StateError, TargetError, UsageError, short
from penstock.filesystem import atomic_files
from penstock.filesystem.state_files import read_json
from penstock.io.flight import Delta
from penstock.io.targets.changes import changes_of
from penstock.io.targets.row_table import blocks_of, row_schema, row_table
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

Function = Callable[[pa.RecordBatch, int], object]

# Key in the metadata of the schema of the empty batch that precedes all rows of the tables.
ANEW = b"penstock.anew"


class PythonFunction(Target):
    """``module:function``. The number of the last delta that it returned from is in a file.

    The function gets batches with the columns ``table``, ``id`` and ``row``, which is null where an id was removed.
    An exception of the function is a failure of the target: the call is repeated.
    """

    def __init__(self, name: str, state: str | os.PathLike[str]) -> None:
        super().__init__(name)
        self._function, self._state = _found(name), Path(state)

    def stored(self) -> Stored | None:
        with failures(str(self._state)):
            if not self._state.exists():
                return None
            try:
                state = read_json(self._state)
                return Stored(Job.decoded(json.dumps(state["job"]), str(self._state)), int(state["step"]))
            except (ValueError, KeyError, TypeError):
                raise StateError(f"{self._state}: not a file that penstock follow --state wrote; use another") from None

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        with failures(str(self._state)):
            self._state.unlink(missing_ok=True)
        self._call(_batch([], job).replace_schema_metadata({ANEW: b"true"}), step)
        for of in tables:
            for part in blocks_of(of):
                self._call(_batch([part], job), step)
        self._keep(job, step)

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        for delta in deltas:
            self._call(_batch(changes_of([delta], job), job), delta.step)
            self._keep(job, delta.step)

    def _call(self, batch: pa.RecordBatch, step: int) -> None:
        try:
            self._function(batch, step)
        except PenstockError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise TargetError(f"{self.name}: step {step}: {type(error).__name__}: {short(text)}") from error

    def _keep(self, job: Job, step: int) -> None:
        with failures(str(self._state)), atomic_files.appearing(self._state) as file:
            file.write(json.dumps({"job": json.loads(job.encoded()), "step": step}).encode())


def _found(name: str) -> Function:
    """Import a function. The working directory is on the path, as for ``python -m``."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name}: {error}; expected module:function") from error
    if not callable(found):
        raise UsageError(f"{name}: expected a function, got {type(found).__name__}")
    function: Function = found
    return function


def _batch(tables: Sequence[TableRows], job: Job) -> pa.RecordBatch:
    schema = row_schema(job, job.id_column_type(), fixed=False)
    whole = row_table(tables, schema, with_removed=True).combine_chunks()
    return next(iter(whole.to_batches()), pa.RecordBatch.from_pylist([], schema))
