"""A decoded batch with its origin, and its bad rows in the order of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.io.decoding.columns import Int64
from penstock.io.decoding.row_checks import REASONS, Sizes, explain, find_bad_rows
from penstock.io.decoding.rows import DecodedBatch
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import Batch
from penstock.model.frames import Rows

Codes = npt.NDArray[np.uint8]


class BadRows(NamedTuple):
    """Bad gradient rows, shape (n,) each: the number of their RowBatch in the batch, and there the row and its code."""

    numbers: Int64
    rows: Int64
    codes: Codes

    def take(self, indices: slice | Int64) -> BadRows:
        return BadRows(self.numbers[indices], self.rows[indices], self.codes[indices])


class TableRun(NamedTuple):
    """The rows of a batch from start to stop, which are one table's."""

    start: int
    stop: int
    table: str
    rows: Rows


def find_all_bad_rows(content: DecodedBatch, sizes: Sizes) -> Sequence[Codes | None] | None:
    """Return the reason codes of the rows of each RowBatch; None if all are good."""
    bad = [find_bad_rows(rows, sizes) for rows in content.row_batches]
    return bad if any(codes is not None for codes in bad) else None


@dataclass(eq=False)
class SourceBatch:
    """A batch of a source, decoded on demand if its rows are read in place.

    raw : before decoding: a quarantine stores the rows as in the source
    decode : returns the contents, for a batch whose contents are not given
    unvalidated : whether ids may be out of range and values not finite; see ``row_checks``
    plain : the rows of an unvalidated batch that is read in place, in order; None: they are in ``content``
    bad : the reason codes of the rows of each RowBatch, as ``find_all_bad_rows`` returns them
    """

    raw: Batch
    roles: Roles
    decode: Callable[[Batch], DecodedBatch]
    unvalidated: bool
    plain: Sequence[TableRun] | None = None
    bad: Sequence[Codes | None] | None = None
    _content: DecodedBatch | None = None
    _validated: SourceBatch | None = field(default=None, init=False)

    @property
    def content(self) -> DecodedBatch:
        """The columns in use as numpy. Raises InputError for damaged ones."""
        if self._content is None:
            self._content = self.decode(self.raw)
        return self._content

    def validated(self, sizes: Sizes) -> SourceBatch:
        """Return the batch after a check of every value."""
        if not self.unvalidated:
            return self
        if self._validated is None:
            bad = find_all_bad_rows(self.content, sizes)
            self._validated = replace(self, unvalidated=False, plain=None, bad=bad)
        return self._validated

    def marked(self, number: int, rows: Int64, code: int) -> SourceBatch:
        """Return the batch, which is validated, with more bad rows in one of its RowBatches."""
        bad: list[Codes | None] = [None] * len(self.content.row_batches) if self.bad is None else list(self.bad)
        codes = bad[number]
        marked = np.zeros(self.content.row_batches[number].num_rows, np.uint8) if codes is None else codes.copy()
        marked[rows] = code
        bad[number] = marked
        return replace(self, bad=bad)

    def bad_rows(self, start: int, stop: int) -> BadRows | None:
        """Return the bad ones among the gradient rows of the source's rows start to stop, in their order."""
        blocks = []
        assert self.bad is not None
        for number, (rows, codes) in enumerate(zip(self.content.row_batches, self.bad, strict=True)):
            if codes is not None:
                span = rows.span(start, stop)
                positions = span.start + np.flatnonzero(codes[span])
                blocks.append((np.full(len(positions), number), positions, codes[positions], *rows.origins(positions)))
        numbers, positions, codes, origins, columns = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        return BadRows(numbers, positions, codes).take(np.lexsort((columns, origins))) if len(positions) else None

    def error(self, bad: BadRows, number: int, sizes: Sizes) -> InputError:
        """Describe one of the bad rows."""
        rows, row, code = self.content.row_batches[bad.numbers[number]], int(bad.rows[number]), int(bad.codes[number])
        problem, column = explain(rows, row, code, sizes, self.roles)
        origins, columns = rows.origins(np.array([row]))
        if rows.examples is not None:
            column = self.roles.names[columns[0]]
        return self.raw.error(int(origins[0]), problem, column, REASONS[code])
