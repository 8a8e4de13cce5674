"""The lookups of a batch of examples, and the gradient rows that they represent, which are never materialized.

A gradient row is one lookup of one feature of one example: its sample's gradient times its gain. The order of rows is
example by example, then feature by feature in the configuration's order, for any batches. Good rows are read table
by table; rows are numbered across the batch only if one of them may be bad.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.frames import Rows
from penstock.io.decoding.columns import Bool, Float32, Int64, Look
from penstock.io.decoding.frame_columns import Broken, FrameColumns
from penstock.io.decoding.rows import RowBatch
from penstock.tables.combiners import not_finite


@dataclass(frozen=True)
class FeatureUses:
    """One feature's lookups of one batch, in order.

    column, table : of the feature; lengths : int64, shape (examples,), lookups of each
    raw_ids : any integers, shape (n,), 0 where ids_null
    gradients : float32, shape (m, dim), of samples; samples : int64, shape (n,), ascending: the sample of each lookup
    gains : float32, shape (n,), None: all 1
    null : examples whose gradient is missing; None: no example with lookups
    truncated : int64, shape (examples,), ids dropped beyond a sequence's length; None if there is no length
    broken : the first example from which on nothing of the feature can be read
    """

    column: str
    table: str
    lengths: Int64
    raw_ids: npt.NDArray[Any]
    ids_null: Bool | None
    gradients: Float32
    samples: Int64
    gains: Float32 | None
    null: Bool | None
    truncated: Int64 | None
    broken: Broken | None

    @property
    def ids(self) -> Int64:
        """Return int64 ids; one that does not fit is negative."""
        return self.raw_ids.astype(np.int64, copy=False)


@dataclass(frozen=True)
class TableUses:
    """The lookups of one table's features, in the order of rows. As in FeatureUses.

    ends : int64, shape (examples + 1,), lookups before each example
    """

    ids: Int64
    gradients: Float32
    samples: Int64
    gains: Float32 | None
    ends: Int64

    def look(self, at: slice | Int64) -> Look:
        return self.gradients, self.samples[at], None if self.gains is None else self.gains[at]

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows of the examples first to last."""
        at = slice(int(self.ends[first]), int(self.ends[last]))
        return Rows(self.ids[at], *self.look(at))


class ExampleBatch:
    """A batch of examples as numpy; the counterpart of ``RowBatch``. ``frame_columns`` has a value per example.

    uses : of every feature that has a column, in the configuration's order
    ends : int64, shape (examples + 1,), gradient rows before each example
    """

    def __init__(self, uses: Sequence[FeatureUses], frame_columns: FrameColumns) -> None:
        self.frame_columns = frame_columns
        self._uses = uses
        self.ends = _ends(sum(of.lengths for of in uses))
        by_table: dict[str, list[FeatureUses]] = {}
        for of in uses:
            by_table.setdefault(of.table, []).append(of)
        self._tables = {table: _joined(of_table) for table, of_table in by_table.items()}
        cut = [of.truncated for of in uses if of.truncated is not None]
        self._truncated: Int64 | None = np.sum(cut, axis=0) if cut else None

    @property
    def num_rows(self) -> int:
        """Return the number of gradient rows."""
        return int(self.ends[-1])

    def may_be_bad(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        return any(of.ids_null is not None or of.null is not None for of in self._uses)

    def rows(self, start: int, stop: int) -> slice:
        """Return the gradient rows of the examples start to stop."""
        return slice(int(self.ends[start]), int(self.ends[stop]))

    def origin(self, row: int) -> tuple[int, str | None]:
        """Return the example and the column that a gradient row belongs to."""
        return int(self.examples[row]), self._uses[int(self.feature_of[row])].column

    def truncated(self, start: int, stop: int) -> int:
        """Count the ids dropped from the examples start to stop."""
        return 0 if self._truncated is None else int(self._truncated[start:stop].sum())

    def by_table(self, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Rows]]:
        """Select rows by table: all of some neighbouring examples, or those of the listed examples."""
        if not isinstance(rows, slice):
            yield from self.by_row().by_table(rows, sizes)
            return
        first, last = np.searchsorted(self.ends, [rows.start, rows.stop]).tolist()
        for name, table in self._tables.items():
            block = table.rows(first, last)
            if len(block.ids):
                yield name, block

    def owned(self) -> ExampleBatch:
        return self

    def by_row(self) -> RowBatch:
        """Convert to separate rows, as a batch of gradient rows is decoded."""
        return self._by_row

    @cached_property
    def _by_row(self) -> RowBatch:
        tables, examples, steps = tuple(self._tables), self.examples, self.frame_columns.steps
        table_of = np.array([tables.index(of.table) for of in self._uses], np.int64)
        codes = table_of[self.feature_of]
        null = self._ordered([_missing(of.ids_null, len(of.raw_ids)) for of in self._uses])
        return RowBatch(
            num_rows=self.num_rows,
            tables=tables,
            codes=None if len(tables) == 1 else codes,
            raw_ids=self._ordered([of.raw_ids for of in self._uses]),
            ids=self._ordered([of.ids for of in self._uses]),
            ids_null=null if null.any() else None,
            gradients=self._gradients(codes),
            frame_columns=FrameColumns(None if steps is None else steps[examples]),
            examples=examples,
        )

    @cached_property
    def examples(self) -> Int64:
        """Return int64, shape (rows,): the example of each row."""
        return np.repeat(np.arange(len(self.ends) - 1), np.diff(self.ends))

    @cached_property
    def feature_of(self) -> Int64:
        """Return int64, shape (rows,): the index of each row's feature, among those that have a column."""
        return self._ordered([np.full(len(of.raw_ids), number) for number, of in enumerate(self._uses)])

    @cached_property
    def _places(self) -> list[Int64]:
        """Return the positions of every feature's lookups among all rows."""
        return _interleaved([of.lengths for of in self._uses])

    def _ordered(self, values: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Merge one array per feature into one array, in the order of rows."""
        kinds = {of.dtype for of in values}
        # No integer type has both signs and all of uint64.
        kind: Any = object if len(kinds) > 1 and np.dtype(np.uint64) in kinds else np.result_type(*kinds)
        out = np.empty(self.num_rows, kind)
        for places, of in zip(self._places, values, strict=True):
            out[places] = of
        return out

    def _gradients(self, codes: Int64) -> LookedUp:
        # The position of each row among its table's.
        at = np.empty(self.num_rows, np.int64)
        for code, table in enumerate(self._tables.values()):
            at[codes == code] = np.arange(len(table.ids))
        null = self._ordered([_of_lookups(of.null, of.lengths) for of in self._uses])
        return LookedUp(tuple(self._tables.values()), codes, at, null if null.any() else None)


@dataclass(frozen=True)
class LookedUp:
    """A gradient per row, computed on demand (``Gradients``).

    codes, at : int64, shape (rows,): the table of each row's lookup, and its position there
    null : rows whose sample has no gradient; None: none
    """

    tables: tuple[TableUses, ...]
    codes: Int64
    at: Int64
    null: Bool | None

    def look(self, rows: slice | Int64, dim: int) -> Look:
        at = self.at[rows]
        return self.tables[int(self.codes[rows][0])].look(at)

    def of_row(self, row: int) -> Float32:
        table, at = self.tables[int(self.codes[row])], int(self.at[row])
        return Rows(table.ids, *table.look(slice(None))).gradient(at)

    def length(self, row: int) -> int:
        return int(self.tables[int(self.codes[row])].gradients.shape[1])

    def differ_from(self, dim: int | np.int64 | Int64) -> Bool:
        return np.asarray(False)  # an example whose gradient has another length stops the reading

    def all_of(self, dim: int, start: int, stop: int) -> bool:
        return True

    def not_finite(self) -> Bool | None:
        found = np.zeros(len(self.at), bool)
        for code, table in enumerate(self.tables):
            # In order, a table's rows are all of its lookups.
            found[self.codes == code] = not_finite(table.gradients, table.samples, table.gains)
        return found if found.any() else None


def _joined(uses: Sequence[FeatureUses]) -> TableUses:
    """Merge the lookups of the features of one table."""
    ends = _ends(sum(of.lengths for of in uses))
    if len(uses) == 1:
        (of,) = uses
        return TableUses(of.ids, of.gradients, of.samples, of.gains, ends)
    ids, samples = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    gains = None if all(of.gains is None for of in uses) else np.ones(ends[-1], np.float32)
    before = 0
    for places, of in zip(_interleaved([of.lengths for of in uses]), uses, strict=True):
        ids[places], samples[places] = of.ids, of.samples + before
        if gains is not None and of.gains is not None:
            gains[places] = of.gains
        before += len(of.gradients)
    return TableUses(ids, np.concatenate([of.gradients for of in uses]), samples, gains, ends)


def _interleaved(lengths: Sequence[Int64]) -> list[Int64]:
    """Return the positions of every feature's lookups in the order of examples, then features."""
    table = np.stack(lengths, axis=1)
    starts = np.cumsum(table).reshape(table.shape) - table
    places = []
    for feature, of in enumerate(lengths):
        shift = starts[:, feature] - (np.cumsum(of) - of)
        places.append(np.repeat(shift, of) + np.arange(of.sum()))
    return places


def _ends(lengths: Any) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _missing(null: Bool | None, number: int) -> Bool:
    return np.zeros(number, bool) if null is None else null


def _of_lookups(null: Bool | None, lengths: Int64) -> Bool:
    return np.repeat(_missing(null, len(lengths)), lengths)
