"""The rows of a table from tensors, in blocks that are converted to float32 and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, PenstockError
from penstock.io.table_formats.table_format import Tensor, reason
from penstock.io.table_formats.tensor_names import KEYS, WantedTable
from penstock.model.frames import Array, Float32, Int64

_BLOCK_BYTES = 1 << 22
_LEAST = np.finfo(np.float32).tiny


def blocks(
    tensors: Mapping[str, Tensor], table: WantedTable, parts: Mapping[str, str], source: str, raised: Counter[str]
) -> Iterator[tuple[Int64, dict[str, Float32]]]:
    """Yield blocks of (ids, part → float32 (n, floats)) of one table. parts : part, or KEYS → name of its tensor

    raised : counts by part the zeros that became the least normal float, where the optimizer divides by them
    Raises InputError: a value that is not finite, or negative where it must not be; a key that occurs twice.
    """
    keys = _keys(tensors[parts[KEYS]], parts[KEYS], source) if KEYS in parts else None
    num_rows = table.num_rows if keys is None else len(keys)
    assert num_rows is not None  # a dynamic table has keys
    names = {part: name for part, name in parts.items() if part != KEYS}
    at_once = max(1, _BLOCK_BYTES // (4 * sum(table.dims[part] for part in names)))
    for start in range(0, num_rows, at_once):
        interrupts.check()
        stop = min(start + at_once, num_rows)
        values = {}
        for part, name in names.items():
            rows = values[part] = _floats(tensors[name], start, stop, name, source)
            if part == table.positive:
                raised[part] += _raise_zeros(rows, start, name, source)
        yield np.arange(start, stop) if keys is None else keys[start:stop], values


def _keys(tensor: Tensor, name: str, source: str) -> Int64:
    keys = np.asarray(tensor.read(0, tensor.shape[0]))
    distinct, counts = np.unique(keys, return_counts=True)
    if len(distinct) < len(keys):
        raise InputError(f"'{name}': key {distinct[np.argmax(counts)]} occurs twice", source=source)
    return keys.astype(np.int64, copy=False)


def _floats(tensor: Tensor, start: int, stop: int, name: str, source: str) -> Float32:
    read = _read(tensor, start, stop, name, source)
    with np.errstate(over="ignore"):
        rows = np.array(read, np.float32, order="C").reshape(stop - start, -1)
    finite = np.isfinite(rows)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        problem = _at(name, start + row, column, "finite", read.reshape(rows.shape)[row, column])
        num_rows, at_once = 0, stop - start
        for first in range(0, tensor.shape[0], at_once):
            block = _read(tensor, first, min(first + at_once, tensor.shape[0]), name, source)
            with np.errstate(over="ignore"):
                num_rows += int((~np.isfinite(block.astype(np.float32))).reshape(len(block), -1).any(axis=1).sum())
        problem += f"; {num_rows} of its rows are not finite: replace them by finite ones"
        raise InputError(problem, source=source)
    return rows


def _read(tensor: Tensor, start: int, stop: int, name: str, source: str) -> Array:
    """Read rows. Libraries raise many types, as in ``library_errors``."""
    try:
        return np.asarray(tensor.read(start, stop))
    except (PenstockError, MemoryError):
        raise
    except Exception as error:
        problem = f"'{name}': rows {start} to {stop - 1} cannot be read: {reason(error)}"
        raise InputError(problem, source=source) from error


def _raise_zeros(rows: Float32, start: int, name: str, source: str) -> int:
    """Replace zeros by the least normal float, and return how many there were. Raises InputError for negative values"""
    negative = rows < 0
    if negative.any():
        row, column = np.argwhere(negative)[0]
        raise InputError(_at(name, start + row, column, "at least 0", rows[row, column]), source=source)
    zeros = rows < _LEAST
    rows[zeros] = _LEAST
    return int(zeros.sum())


def _at(name: str, row: int, column: int, expected: str, value: object) -> str:
    return f"'{name}', row {row}, column {column}: expected a number that is {expected}, got {value}"
