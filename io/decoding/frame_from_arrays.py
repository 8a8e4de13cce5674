"""Convert arrays in memory to one frame, with the same checks as for a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.base.array_conversion import as_array, as_arrow, as_numbers
from penstock.base.errors import InputError, UsageError, listed
from penstock.base.validation import is_masked
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.decoding.role_types import suggestion
from penstock.model.config.id_ranges import ANY_UINT64, exact_integers, expected, outside
from penstock.model.frames import Frame, Rows

# Created once: comparing with a type creates one each time, as ``int | str`` does.
_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_PLAIN = 0x0101  # NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED
_MAPPINGS, _PAIRS = (dict, Mapping), (tuple, list)  # the check of a dict is quick, that of a Mapping is not


def check_gradients(gradients: Any) -> None:
    """Raise UsageError for what is no mapping of pairs."""
    expected = "gradients: expected a mapping table → (ids, gradients)"
    if not isinstance(gradients, _MAPPINGS):
        raise UsageError(f"{expected}, got {type(gradients).__name__}")
    for table, pair in gradients.items():
        if not isinstance(pair, _PAIRS) or len(pair) != 2:
            got = f"{len(pair)} values" if isinstance(pair, _PAIRS) else type(pair).__name__
            raise UsageError(f"{expected}, got {got} for '{table}'")


def one_frame(
    gradients: Mapping[str, tuple[Any, Any]],
    sizes: Mapping[str, tuple[int, int]],
    local_step: int | None,
    contributor: int | str | None = None,
    time: int | None = None,
) -> Frame:
    """Convert table → (ids, gradients) to a Frame, whose audit checks arrays that need no conversion to be summed.

    ids : integers, shape (n,); gradients : floats, shape (n, dim); numpy, jax or Arrow arrays
    Raises UsageError if gradients is not a mapping of pairs, and InputError as for a stream, or its audit does; the
    source is then ``apply('table')``.
    """
    check_gradients(gradients)

    def checked() -> Frame:
        rows = {table: _checked(table, ids, values, sizes) for table, (ids, values) in gradients.items()}
        rows = {table: blocks for table, blocks in rows.items() if blocks}
        num_rows = sum(len(block.ids) for blocks in rows.values() for block in blocks)
        return Frame(rows, num_rows, local_step, contributor, source="apply()", time=time)

    rows: dict[str, tuple[Rows, ...]] = {}
    num_rows = 0
    for table, (ids, values) in gradients.items():
        block = _plain_rows(ids, values, sizes.get(table))
        if block is None:
            return checked()
        if len(ids):
            rows[table] = (block,)
            num_rows += len(ids)
    return Frame(rows, num_rows, local_step, contributor, source="apply()", audit=checked, time=time)


def _plain_rows(ids: Any, values: Any, size: tuple[int, int] | None) -> Rows | None:
    """Return NumPy arrays that need no conversion to be summed; None for everything else. size : of the table"""
    if size is None or size[0] == ANY_UINT64:
        return None
    for array in (ids, values):
        if type(array) is not np.ndarray and (not isinstance(array, np.ndarray) or is_masked(array)):
            return None
    if ids.dtype != _INT64 or values.dtype != _FLOAT32 or ids.ndim != 1 or values.shape != (len(ids), size[1]):
        return None
    return Rows(ids, values) if ids.flags.num & values.flags.num & _PLAIN == _PLAIN else None


def _checked(table: str, ids: Any, values: Any, sizes: Mapping[str, tuple[int, int]]) -> tuple[Rows, ...]:
    """Convert a table's arrays through Arrow, with a check of every value."""
    if table not in sizes:
        problem = f"expected a table of the configuration ({listed(sizes)}), got '{table}'"
        raise InputError(problem + suggestion(str(table), sizes), source="apply()", reason="unknown_table")
    source = f"apply('{table}')"
    columns = {"id": _ids(ids, sizes[table][0], source), "gradient": _gradients(values, source)}
    if len(columns["id"]) != len(columns["gradient"]):
        lengths = f"{len(columns['id'])} ids and {len(columns['gradient'])} gradients"
        raise InputError(f"expected as many gradients as ids, got {lengths}", source=source)
    try:
        frames = list(FrameReader(pa.RecordBatch.from_pydict(columns), ReadOptions(sizes, table=table)))
    except InputError as error:
        raise InputError(
            error.problem, source=source, row=error.row, column=error.column, reason=error.reason
        ) from None
    return frames[0].rows[table] if frames else ()


def _ids(ids: Any, size: int, source: str) -> pa.Array:
    if isinstance(ids, pa.Array | pa.ChunkedArray):
        return _arrow(ids, source)
    array = as_array(ids, source, InputError)
    exact = exact_integers(ids, array)
    if exact is None or array.ndim != 1:
        raise InputError(f"expected integers of shape (n,), got {array.dtype} of shape {array.shape}", source=source)
    if exact.dtype == object:
        if (bad := outside(exact, size)).any():
            problem, row = f"expected {expected(size)}, got {exact[bad][0]}", int(bad.argmax())
            raise InputError(problem, source=source, row=row, column="id", reason="id_out_of_range")
        exact = exact.astype(np.uint64 if size == ANY_UINT64 else np.int64)
    return pa.array(exact)


def _gradients(values: Any, source: str) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return _arrow(values, source)
    array = as_numbers(values, source, InputError)
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.shape in ((0,), (0, 0)):
        array = array.reshape(0, 1)  # no rows, of any length: empty columns of lists do not know it
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating) or array.shape[1] < 1:
        got = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"expected floats of shape (n, dim), got {got}", source=source)
    if array.dtype not in (np.float16, np.float32, np.float64):
        with np.errstate(over="ignore"):  # values that are finite only as longdouble are reported as not finite
            array = array.astype(np.float64)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def _arrow(values: pa.Array | pa.ChunkedArray, source: str) -> pa.Array:
    column = as_arrow(values, source, InputError)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
