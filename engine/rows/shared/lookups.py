"""Lookups without a lock: of rows as they are, or of several tables at one step.

What ``Reader`` and the engine's lookups have in common; where the rows lie is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.base.errors import ReadTimeoutError, UsageError, listed
from penstock.base.validation import whole
from penstock.model.config.id_ranges import integer_ids, valid_ids
from penstock.model.frames import Array, Float32, Int64
from penstock.model.row_encodings import FLOAT32, RowEncoding
from penstock.pyx.row_keys import RowKeys
from penstock.pyx.row_reads import RowReads, StepWords
from penstock.rows.shared.header import TableLayout

# Called while a lookup waits for a writer; raises if it waits in vain. Argument: what it waits for.
Check = Callable[[str], None]
# Between two looks at a page that is being written for long: its thread has lost its processor.
_PAUSE_S = 0.0001


class TableReads:
    """One table for reads without a lock.

    parts : of every device, its rows and the counters of their pages; keys : of a dynamic table
    Raises ValueError if they do not fit the layout.
    """

    def __init__(self, layout: TableLayout, parts: list[tuple[Float32, Any]], keys: RowKeys | None) -> None:
        self.layout, self.keys = layout, keys
        self._reads = RowReads(replace(layout, dim=layout.num_words), parts, keys)
        absent = None if layout.keys is None else layout.keys.absent
        has_vectors = absent is not None and absent.kind == "vectors"
        self._vectors = absent.vectors(layout.id_type, layout.dim) if absent is not None and has_vectors else None

    def read(self, ids: Int64, out: Array, check: Check, rows: RowEncoding = FLOAT32) -> None:
        """Copy the weights of ids to ``out``. Raises UsageError for an id outside the table.

        check : called while a page is being written for long; rows : of ``out``, float32 or that of the table
        """
        stored, dim = self.layout.row_encoding, self.layout.dim
        if stored is rows is FLOAT32:
            self._read(ids, out, check)
            return
        words = np.empty((len(ids), self.layout.num_words), np.float32)
        self._read(ids, words, check)
        encoded = rows.encode(words) if stored is FLOAT32 else words.view(np.uint8)[:, : stored.row_bytes(dim)]
        if rows is FLOAT32:
            out[:] = stored.decode(encoded)
        else:
            out.view(np.uint8)[:] = encoded

    def _read(self, ids: Int64, out: Float32, check: Check) -> None:
        """Copy the weights as they are stored. out : (n, num_words)"""
        absent = np.zeros(len(ids), np.uint8)
        done = self._copied(ids, out, absent, 0)
        while done < len(ids):
            check(f"table '{self.layout.name}': the page of the row of id {self.layout.as_given(ids)[done]} is written")
            time.sleep(_PAUSE_S)
            done = self._copied(ids, out, absent, done)
        if self.layout.keys is not None and absent.any():
            mask = absent.view(bool)
            rows = np.empty((int(mask.sum()), self.layout.dim), np.float32)
            self.layout.keys.absent.fill(self.layout.as_given(ids[mask]), rows)
            out[mask] = as_words(self.layout.row_encoding, rows)

    def _copied(self, ids: Int64, out: Float32, absent: Any, first: int) -> int:
        """Copy rows from the first-th on. Return how many are copied, of all ids."""
        try:
            return self._reads.read(ids, out, absent, first)
        except ValueError:
            # Raises for the first one outside.
            valid_ids(self.layout.name, self.layout.as_given(ids), self.layout.id_range)
            raise


def as_words(encoding: RowEncoding, rows: Float32) -> Float32:
    """Return rows as a table stores them."""
    return rows if encoding is FLOAT32 else words_of(encoding.encode(rows))


def words_of(encoded: Array) -> Float32:
    """Return the bytes of encoded rows as floats, with zeros after them."""
    num_rows, row_bytes = encoded.shape
    words = np.zeros((num_rows, -(-row_bytes // 4)), np.float32)
    words.view(np.uint8)[:, :row_bytes] = encoded
    return words


class Deadline:
    """A time limit of a lookup. timeout_ms : from now on; Raises UsageError if it is no whole number"""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = whole("timeout_ms", timeout_ms, 0)
        self._end_s = time.monotonic() + self._timeout_ms / 1000

    def check(self, reason: str) -> None:
        """Raise ReadTimeoutError after the time limit. reason : what the lookup waits for"""
        if time.monotonic() >= self._end_s:
            raise ReadTimeoutError(f"no rows after {self._timeout_ms:,} ms: {reason}; give a larger timeout_ms")


def table_of(tables: Mapping[str, TableReads], name: Any, place: str) -> TableReads:
    """Return a table by name. Raises UsageError. place : where it was expected, for the message"""
    if not isinstance(name, str) or name not in tables:
        raise UsageError(f"no table '{name}' {place} ({listed(tables)})")
    return tables[name]


def read_tables(
    tables: Mapping[str, TableReads],
    words: StepWords,
    ids: Mapping[str, Any],
    out: Mapping[str, Any],
    consistent: bool,
    check: Check,
    place: str,
    encoding: RowEncoding = FLOAT32,
) -> tuple[dict[str, Array], int]:
    """Return rows of several tables, and their step: with ``consistent`` of all, else of the oldest.

    ids, out : by table, as of a lookup; check : called while the lookup waits; place : of the tables, for messages
    encoding : of the rows
    Raises UsageError for unknown tables, for ids that are none of their table, and for rows in another encoding.
    """
    if not isinstance(ids, Mapping):
        raise UsageError(f"expected a mapping of tables to ids, got {type(ids).__name__}")
    layouts = {name: table_of(tables, name, place).layout for name in ids}
    wanted = {name: _stored_ids(layouts[name], values) for name, values in ids.items()}
    for layout in layouts.values():
        if encoding is not FLOAT32 and layout.row_encoding not in (FLOAT32, encoding):
            stored, problem = layout.encoding, f"dtype {encoding.name}: its rows are stored as {layout.encoding}"
            raise UsageError(f"table '{layout.name}', {problem}; read them as {FLOAT32.name} or {stored}")
    rows = {
        name: _checked_out(name, out.get(name), len(wanted[name]), layout.dim, encoding)
        for name, layout in layouts.items()
    }
    while True:
        sequence = words.settled() if consistent else words.sequence
        if consistent and sequence & 1:
            check(f"step {words.step + 1} runs, and the rows of one step were requested")
            continue
        step = words.step
        for name, table_ids in wanted.items():
            tables[name].read(table_ids, rows[name], check, encoding)
        if not consistent or words.is_still(sequence):
            return rows, step
        check("a step ran during every copy of the rows of one step")


def _stored_ids(layout: TableLayout, ids: Any) -> Int64:
    """Return ids as a table stores them. Raises UsageError for keys that its type does not have."""
    array = integer_ids(layout.name, ids)
    if array.dtype != layout.id_type:
        array = valid_ids(layout.name, array, layout.id_range)
    return array.reshape(-1).copy().view(np.int64)  # those of a message need not be aligned


def _checked_out(table: str, out: Any, num_rows: int, dim: int, encoding: RowEncoding) -> Array:
    """Return ``out``, or a new array: of float32 (num_rows, dim). Raises UsageError for an array that does not fit."""
    shape, dtype = (num_rows, encoding.row_bytes(dim) // encoding.dtype.itemsize), encoding.dtype
    if out is None:
        return np.empty(shape, dtype)
    fitting: Array = out
    is_fit = isinstance(out, np.ndarray) and out.dtype == dtype and out.shape == shape
    if not is_fit or not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError(f"table '{table}', out: expected a writable, contiguous {dtype} array of {shape}")
    return fitting
