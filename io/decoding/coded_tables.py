"""Read batches of several tables in place: a dictionary column names each row's table, and neighbouring rows share one.

``row_columns.decode_rows`` reads the batches that do not fit, and reports their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.io.decoding.columns import ROWS_OF_A_RUN, Runs
from penstock.io.decoding.schema import Roles
from penstock.io.decoding.source_batch import TableRun
from penstock.io.sources.batch import RAISED, PlainRoles
from penstock.io.sources.plain_messages import BatchRun
from penstock.model.config.id_ranges import ANY_INT64
from penstock.model.frames import Int64, Rows
from penstock.pyx.buffer_pool import Pool
from penstock.pyx.coded_rows import CodedRows
from penstock.pyx.plain_batches import coded_rows

_OFFSET_BYTES: Mapping[int, int] = {pa.lib.Type_LIST: 4, pa.lib.Type_LARGE_LIST: 8}


class CodedBatch(NamedTuple):
    """The rows of a batch. tables : runs of one table; steps : runs of one step, None: there are no steps"""

    tables: tuple[TableRun, ...]
    steps: Runs | None


class Names(NamedTuple):
    """The tables of a dictionary. identity : of its memory, which no other one has while ``kept`` keeps it

    names : by code; dims : int64, of them, -1: there is no table of that name, or not of such ids
    """

    identity: object
    kept: pa.Array
    names: list[str]
    dims: Int64


class CodedTables:
    """Reads batches whose table column is dictionary-encoded; a stream's schema is checked once.

    Expects int64 ids, float32 gradients in lists of the table's dim, optionally an int64 step, no nulls, and long runs
    of rows of one table.

    roles : the columns
    """

    def __init__(
        self, roles: PlainRoles, code_bytes: int, offset_bytes: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        assert roles.table_column is not None
        self.roles, self._column, self._sizes = roles, roles.table_column, sizes
        self._bytes = code_bytes, offset_bytes
        self._arguments: tuple[int, ...] = ()  # of ``coded_rows``: the same for all batches
        self._names: Names | None = None  # of the last batch
        self._pool = Pool()

    def read(self, batch: pa.RecordBatch) -> CodedBatch | None:
        """Return the rows of a batch; None if it does not fit, or is damaged."""
        try:
            # Not full=True: codes and offsets are checked run by run, and numbers need no check.
            batch.validate()
            arguments = self._arguments or self._column_arguments(batch)
            read = coded_rows(batch.__arrow_c_array__()[1], self._pool, *arguments)
            return None if read is None else self._rows(*read, lambda: batch.column(self._column).dictionary)
        except RAISED:
            return None

    def read_message(self, run: BatchRun) -> CodedBatch | None:
        """Return the rows of the one batch of a run; None if it does not fit, or is damaged."""
        try:
            return self._rows(run.coded, id(run.dictionary), lambda: run.dictionary)
        except RAISED:
            return None

    def _rows(self, rows: CodedRows, identity: object, dictionary: Callable[[], pa.Array]) -> CodedBatch | None:
        names = self._names
        if names is None or names.identity != identity:
            names = self._names_of(identity, dictionary(), rows.num_rows)
            if names is None:
                return None
        runs = rows.table_runs(names.dims, rows.num_rows // ROWS_OF_A_RUN + 1)
        if runs is None:
            return None
        ids_at, floats_at, num_floats = rows.addresses
        ids = np.frombuffer(pa.foreign_buffer(ids_at, 8 * rows.num_rows, rows), np.int64)
        floats = np.frombuffer(pa.foreign_buffer(floats_at, 4 * num_floats, rows), np.float32)
        tables = []
        for start, stop, code, first in runs:
            num_rows, dim = stop - start, int(names.dims[code])
            grads = floats[first : first + num_rows * dim].reshape(num_rows, dim)
            tables.append(TableRun(start, stop, names.names[code], Rows(ids[start:stop], grads)))
        return CodedBatch(tuple(tables), rows.step_runs())

    def _column_arguments(self, batch: pa.RecordBatch) -> tuple[int, ...]:
        roles, index = self.roles, batch.schema.get_field_index
        assert roles.gradient is not None
        code_bytes, offset_bytes = self._bytes
        step = -1 if roles.step is None else index(roles.step)
        columns = index(self._column), code_bytes, index(roles.id), index(roles.gradient)
        self._arguments = (batch.num_columns, *columns, roles.width, offset_bytes, step)
        return self._arguments

    def _names_of(self, identity: object, dictionary: pa.Array, num_rows: int) -> Names | None:
        """Return the tables of a dictionary. Names that outnumber the rows of a batch are not listed for it: None."""
        dictionary.validate(full=True)
        if len(dictionary) > num_rows:
            return None
        names, dims = dictionary.to_pylist(), []
        for name in names:
            size, dim = self._sizes.get(name, (0, -1))
            # The kernel takes every int64 for a key of a dynamic table, so tables of uint64 keys do not fit.
            dims.append(dim if size > 0 or size == ANY_INT64 else -1)
        self._names = Names(identity, dictionary, names, np.array(dims, np.int64))
        return self._names


def coded_tables(roles: Roles, sizes: Mapping[str, tuple[int, int]]) -> CodedTables | None:
    """Return a reader of such batches; None if no batch of these roles fits."""
    others = (roles.contributor, roles.learning_rates, roles.time)
    if roles.table is None or roles.bfloat16 or roles.ids_only or any(field is not None for field in others):
        return None
    gradient, kind = roles.gradient.type, roles.table.type
    if not pa.types.is_dictionary(kind) or not pa.types.is_signed_integer(kind.index_type):
        return None
    if gradient.id not in _OFFSET_BYTES and not pa.types.is_fixed_size_list(gradient):
        return None
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if gradient.value_type != pa.float32() or any(number != pa.int64() for number in numbers):
        return None
    offset_bytes = _OFFSET_BYTES.get(gradient.id, 0)
    width, step = 0 if offset_bytes else gradient.list_size, None if roles.step is None else roles.step.name
    plain = PlainRoles("", roles.id.name, roles.gradient.name, step, width, 1, False, roles.table.name)
    return CodedTables(plain, kind.index_type.bit_width // 8, offset_bytes, sizes)
