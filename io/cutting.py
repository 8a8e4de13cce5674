"""Decoded batches → pieces of one key → frames.

A frame takes in pieces until the key changes, it is full, or its end is told. A bad row stops the
reading when its own frame is cut, not before: every whole frame ahead of it has been handed out,
however the stream is chopped into batches. Opens nothing and reads nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InputError
from penstock.frames import Frame, Rows
from penstock.io.bad_rows import bad_rows
from penstock.io.columns import Int64
from penstock.io.decode import REASONS, Decoded, explain, find_bad_rows
from penstock.io.options import ReadOptions
from penstock.io.schema import Roles

Key = tuple[int | None, Any]  # step, contributor


@dataclass(frozen=True)
class Place:
    """Where a batch stood."""

    source: str
    batch: int | None  # None: the source has no batches of its own
    first_row: int  # of the batch, counted over the source

    def error(self, row: int, problem: str, column: str | None, reason: str | None = None) -> InputError:
        """row : of the batch"""
        at = row if self.batch is not None else self.first_row + row
        return InputError(problem, source=self.source, batch=self.batch, row=at, column=column, reason=reason)


@dataclass(eq=False)
class Piece:
    """Rows start to stop of a decoded batch: one key."""

    decoded: Decoded
    bad: npt.NDArray[np.uint8] | None  # the reason code of every row of the batch; None: all are good
    start: int
    stop: int
    key: Key
    roles: Roles
    place: Place
    batch: pa.RecordBatch  # what was decoded: a quarantine takes the rows as they came
    unseen: bool = False  # whether ids are in range and values finite is for the audit to say
    examples: Int64 | None = None  # of an example stream: which example of the batch each row is of, ascending
    first: int = 0  # and its examples are first to last, with rows or without
    last: int = 0

    def audited(self, sizes: Mapping[str, tuple[int, int]]) -> Piece:
        """The same after a look at every value."""
        return replace(self, bad=find_bad_rows(self.decoded, sizes), unseen=False) if self.unseen else self

    @property
    def num_units(self) -> int:
        """Rows, or examples: what contribution_rows counts, and what makes a frame."""
        return self.stop - self.start if self.examples is None else self.last - self.first

    @property
    def units(self) -> slice:
        """Where the batch's steps, contributors and rates of this piece stand."""
        return slice(self.start, self.stop) if self.examples is None else slice(self.first, self.last)

    def cut(self, room: int | None) -> tuple[Piece, Piece | None]:
        """The first rows that there is room for, and the rest if any."""
        if room is None or self.num_units <= room:
            return self, None
        if self.examples is None:
            at = self.start + room
            return replace(self, stop=at), replace(self, start=at)
        at = int(np.searchsorted(self.examples, self.first + room))
        return replace(self, stop=at, last=self.first + room), replace(self, start=at, first=self.first + room)


class FrameBuilder:
    """Pieces in, frames out; holds the one frame that is not known to be whole.

    first_bad : the first row dropped for each reason, as an error message
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self.first_bad: dict[str, str] = {}
        self._begin()

    def add(self, piece: Piece) -> Iterator[Frame]:
        """Take a piece in; yields the frames that this completes. Raises InputError at a bad row."""
        if piece.key != self._key:
            yield from self.end()
        rest: Piece | None = piece
        while rest is not None:
            limit = self._options.contribution_rows
            here, rest = rest.cut(None if limit is None else limit - self._num_units)
            self._take(here)
            if self._num_units == limit:
                yield from self.end()

    def end(self) -> Iterator[Frame]:
        """The frame held, if any, is whole."""
        if self._num_units:
            yield self._frame()
            self._begin()

    def _frame(self) -> Frame:
        rows = {table: tuple(blocks) for table, blocks in self._rows.items()}
        step, contributor = self._key
        audit = partial(self._audited, tuple(self._pieces)) if any(p.unseen for p in self._pieces) else None
        dropped = dict(self._dropped)
        return Frame(
            rows, self._num_rows, step, contributor, self._rates, dropped, self._source, tuple(self._aside), audit
        )

    def _audited(self, pieces: tuple[Piece, ...]) -> Frame:
        """The frame of these pieces after a look at every value."""
        again = FrameBuilder(self._options)
        again.first_bad = self.first_bad
        for piece in pieces:
            again._take(piece.audited(self._options.sizes))
        return again._frame()

    def _begin(self) -> None:
        self._num_rows, self._num_units, self._source = 0, 0, ""
        self._key: Key = (None, None)
        self._rows: dict[str, list[Rows]] = {}
        self._dropped: Counter[str] = Counter()
        self._aside: list[pa.RecordBatch] = []
        self._rates: tuple[float, ...] | None = None
        self._pieces: list[Piece] = []

    def _take(self, piece: Piece) -> None:
        if not self._num_units:
            self._key, self._source = piece.key, piece.place.source
        self._take_rates(piece)
        if self._options.unseen:  # else there will be no audit, and rows that are left out need no memory
            self._pieces.append(piece)
        self._num_rows += piece.stop - piece.start
        self._num_units += piece.num_units
        decoded = piece.decoded
        rows: slice | Int64 = slice(piece.start, piece.stop)
        if piece.bad is not None and piece.bad[rows].any():
            rows = self._good_rows(piece, piece.bad[rows])
        if decoded.codes is None:
            self._take_rows(decoded, 0, rows)
            return
        if isinstance(rows, slice):
            if decoded.runs is not None:
                for start, stop, code in decoded.runs:
                    self._take_rows(decoded, code, slice(max(start, piece.start), min(stop, piece.stop)))
                return
            rows = np.arange(piece.start, piece.stop)
        codes = decoded.codes[rows]
        if len(decoded.tables) < 1 << 15:
            codes = codes.astype(np.int16)  # numpy's radix sort
        order = np.argsort(codes, kind="stable")  # each table's rows stay in arrival order
        codes, rows = codes[order], rows[order]
        cuts = np.flatnonzero(np.diff(codes)) + 1
        for of_table in np.split(rows, cuts):
            if len(of_table):
                self._take_rows(decoded, int(decoded.codes[of_table[0]]), _as_slice(of_table))

    def _good_rows(self, piece: Piece, bad: npt.NDArray[np.uint8]) -> Int64:
        """Count the bad rows and say the first of each kind, or raise."""
        for code in np.unique(bad[bad != 0]).tolist():
            reason = REASONS[code]
            if self._options.on_bad_row == "error":
                raise _bad_row(piece, int(np.argmax(bad != 0)), self._options)
            if reason not in self.first_bad:
                self.first_bad[reason] = str(_bad_row(piece, int(np.argmax(bad == code)), self._options))
            self._dropped[reason] += int((bad == code).sum())
        if self._options.on_bad_row == "quarantine":
            place = (piece.place.source, piece.place.batch, piece.place.first_row)
            self._aside += bad_rows(piece.batch, piece.decoded, piece.roles, place, bad, piece.start)
        return piece.start + np.flatnonzero(bad == 0)

    def _take_rows(self, decoded: Decoded, code: int, rows: slice | Int64) -> None:
        ids = decoded.ids[rows]
        if not len(ids):
            return
        table = decoded.tables[code]
        assert table is not None  # a row without a table is a bad row
        grads, which = decoded.gradients.look(rows, self._options.sizes[table][1])
        self._rows.setdefault(table, []).append(Rows(ids, grads, which))

    def _take_rates(self, piece: Piece) -> None:
        rates, roles = piece.decoded.rates, piece.roles
        if rates is None or roles.learning_rates is None:
            return
        broken = piece.decoded.no_rates
        if broken is not None and broken.row < piece.units.stop:
            raise piece.place.error(broken.row, broken.problem, broken.column)
        rates = rates[piece.units]
        wanted = rates[0] if self._rates is None else np.array(self._rates, np.float32)
        same = (rates == wanted).all(axis=1)
        if not same.all():
            row = int(np.argmin(same))
            problem = f"learning rates change inside a frame: {wanted.tolist()}, then {rates[row].tolist()}"
            raise piece.place.error(piece.units.start + row, problem, roles.learning_rates.name)
        self._rates = tuple(wanted.tolist())


def run_keys(decoded: Decoded, num_rows: int | None = None) -> Iterator[tuple[int, int, Key]]:
    """The runs of equal (step, contributor) of a batch's rows, or of the first so many: (start, stop, key)."""
    num_rows = decoded.num_rows if num_rows is None else num_rows
    if not num_rows:
        return
    if decoded.steps is None and decoded.contributors is None:
        yield 0, num_rows, (None, None)
        return
    change = np.zeros(num_rows, bool)
    change[0] = True
    for codes in (decoded.steps, decoded.contributors and decoded.contributors[0]):
        if codes is not None:
            change[1:] |= codes[1:num_rows] != codes[: num_rows - 1]
    starts: list[int] = np.flatnonzero(change).tolist()
    for start, stop in zip(starts, [*starts[1:], num_rows], strict=True):
        yield start, stop, _key(decoded, start)


def _key(decoded: Decoded, row: int) -> Key:
    step = None if decoded.steps is None else int(decoded.steps[row])
    if decoded.contributors is None:
        return step, None
    codes, values = decoded.contributors
    return step, values[codes[row]] if codes[row] >= 0 else None


def _bad_row(piece: Piece, row: int, options: ReadOptions) -> InputError:
    """row : of the piece"""
    assert piece.bad is not None
    row += piece.start
    code = int(piece.bad[row])
    problem, column = explain(piece.decoded, row, code, options.sizes, piece.roles)
    return piece.place.error(row, problem, column, REASONS[code])


def _as_slice(rows: Int64) -> slice | Int64:
    """Neighbouring rows as a slice: a view then, not a copy."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
