"""Read batches of several tables in place: a dictionary column names each row's table, and neighbouring rows share one.

``row_columns.decode_rows`` reads the batches that do not fit, and reports their errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.io.decoding.columns import ROWS_OF_A_RUN, Runs
from penstock.io.decoding.schema import Roles
from penstock.io.decoding.source_batch import TableRun
from penstock.io.sources.batch import RAISED
from penstock.model.config.id_ranges import ANY_INT64
from penstock.model.frames import Rows
from penstock.pyx.plain_batches import coded_columns
from penstock.pyx.run_lengths import equal_runs, length_runs

_OFFSETS: Mapping[int, type] = {pa.lib.Type_LIST: np.uint32, pa.lib.Type_LARGE_LIST: np.uint64}

NamesAndDims = list[tuple[str, int]]  # of tables, by dictionary index


class CodedRows(NamedTuple):
    """The rows of a batch. tables : runs of one table; steps : runs of one step, None: there are no steps"""

    tables: tuple[TableRun, ...]
    steps: Runs | None


class CodedTables:
    """Reads batches whose table column is dictionary-encoded; a stream's schema is checked once.

    Expects int64 ids, float32 gradients in lists of the table's dim, optionally an int64 step, no nulls, and long runs
    of rows of one table.
    """

    def __init__(self, roles: Roles, sizes: Mapping[str, tuple[int, int]]) -> None:
        assert roles.table is not None
        gradient = roles.gradient.type
        self._roles, self._sizes = roles, sizes
        self._codes = roles.table.type.index_type.to_pandas_dtype()
        self._offsets = _OFFSETS.get(gradient.id)
        self._width = gradient.list_size if self._offsets is None else 0
        self._arguments: tuple[int, ...] = ()  # of ``coded_columns``: the same for all batches
        self._dictionary: tuple[object, pa.Array, NamesAndDims] | None = None  # of the last batch

    def read(self, batch: pa.RecordBatch) -> CodedRows | None:
        """Return the rows of a batch; None if it does not fit, or is damaged."""
        try:
            # Not full=True: codes and offsets are checked below, run by run, and numbers need no check.
            batch.validate()
            return self._read(batch)
        except RAISED:
            return None

    def _read(self, batch: pa.RecordBatch) -> CodedRows | None:
        memory, num_rows = batch.__arrow_c_array__()[1], batch.num_rows
        columns = coded_columns(memory, *(self._arguments or self._column_arguments(batch)))
        if columns is None:
            return None
        codes_at, ids_at, offsets_at, floats_at, steps_at, num_floats, identity = columns
        max_runs = num_rows // ROWS_OF_A_RUN + 1
        tables = equal_runs(_view(codes_at, self._codes, num_rows, memory), max_runs)
        names = self._names(batch, identity)
        if tables is None or names is None:
            return None
        floats = _view(floats_at, np.float32, num_floats, memory)
        lengths: Runs | None = [(0, num_rows, self._width)]
        offsets = None
        if self._offsets is not None:
            offsets = _view(offsets_at, self._offsets, num_rows + 1, memory)
            lengths = length_runs(offsets, num_floats, max_runs)
        steps = None
        if steps_at:
            steps = equal_runs(_view(steps_at, np.int64, num_rows, memory), num_rows)
        ids = _view(ids_at, np.int64, num_rows, memory)
        runs = []
        for start, stop, code in tables:
            table, dim = names[code] if 0 <= code < len(names) else ("", -1)
            if lengths is None or any(length != dim for a, b, length in lengths if a < stop and b > start):
                return None
            first = start * dim if offsets is None else int(offsets[start])
            grads = floats[first : first + (stop - start) * dim].reshape(stop - start, dim)
            runs.append(TableRun(start, stop, table, Rows(ids[start:stop], grads)))
        return CodedRows(tuple(runs), steps)

    def _column_arguments(self, batch: pa.RecordBatch) -> tuple[int, ...]:
        roles, index = self._roles, batch.schema.get_field_index
        assert roles.table is not None
        code_bytes, offset_bytes = np.dtype(self._codes).itemsize, np.dtype(self._offsets or np.uint32).itemsize
        step = -1 if roles.step is None else index(roles.step.name)
        columns = index(roles.table.name), code_bytes, index(roles.id.name), index(roles.gradient.name)
        self._arguments = (batch.num_columns, *columns, self._width, offset_bytes, step)
        return self._arguments

    def _names(self, batch: pa.RecordBatch, identity: object) -> NamesAndDims | None:
        """Return the tables of a batch by code, -1 as the dim of those that do not fit.

        Returns None if the names are damaged, or outnumber the rows.
        identity : of the dictionary's memory, which no other one has while this one is kept
        """
        assert self._roles.table is not None
        if self._dictionary is None or self._dictionary[0] != identity:
            dictionary = batch.column(self._roles.table.name).dictionary
            dictionary.validate(full=True)
            if len(dictionary) > batch.num_rows:
                return None
            names = []
            for name in dictionary.to_pylist():
                size, dim = self._sizes.get(name, (0, -1))
                # The kernel takes every int64 for a key of a dynamic table, so tables of uint64 keys do not fit.
                names.append((name, dim if size > 0 or size == ANY_INT64 else -1))
            self._dictionary = identity, dictionary, names
        return self._dictionary[2]


def coded_tables(roles: Roles, sizes: Mapping[str, tuple[int, int]]) -> CodedTables | None:
    """Return a reader of such batches; None if no batch of these roles fits."""
    others = (roles.contributor, roles.learning_rates, roles.time)
    if roles.table is None or roles.bfloat16 or roles.ids_only or any(field is not None for field in others):
        return None
    gradient, kind = roles.gradient.type, roles.table.type
    if not pa.types.is_dictionary(kind) or not pa.types.is_signed_integer(kind.index_type):
        return None
    if gradient.id not in _OFFSETS and not pa.types.is_fixed_size_list(gradient):
        return None
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if gradient.value_type != pa.float32() or any(number != pa.int64() for number in numbers):
        return None
    return CodedTables(roles, sizes)


def _view(address: int, dtype: npt.DTypeLike, count: int, memory: Any) -> npt.NDArray[Any]:
    return np.frombuffer(pa.foreign_buffer(address, count * np.dtype(dtype).itemsize, memory), dtype)
