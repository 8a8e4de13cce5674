"""Convert decoded batches to pieces of one key, and pieces to frames.

A frame takes pieces until the key changes, it is full, or metadata marks its end. A bad row stops the
reading when its frame ends, not before: every complete frame before it has been returned,
for any division of the stream into batches. This module opens and reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InputError
from penstock.frames import Frame, Rows
from penstock.io.decoding.bad_rows import bad_rows
from penstock.io.decoding.columns import Int64
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.rows import MAX_TIME, REASONS, Content, explain, find_bad_rows
from penstock.io.decoding.schema import Roles

Key = tuple[int | None, Any]  # step, contributor
# The size of a frame's unchecked gradients, if bad rows are dropped: beyond it they are checked while the frame is
# still incomplete, so that memory does not grow with rows that will be dropped.
UNSEEN_BYTES = 64 << 20


@dataclass(eq=False)  # not frozen, like all per-frame objects: frames.py gives the reason
class Place:
    """The location of a batch."""

    source: str
    batch: int | None  # None: the source has no batches of its own
    first_row: int  # of the batch, counted over the source

    def error(self, row: int, problem: str, column: str | None, reason: str | None = None) -> InputError:
        """row : of the batch"""
        at = row if self.batch is not None else self.first_row + row
        return InputError(problem, source=self.source, batch=self.batch, row=at, column=column, reason=reason)


@dataclass(eq=False)
class Piece:
    """Rows start to stop of a decoded batch, with one key."""

    decoded: Content
    bad: npt.NDArray[np.uint8] | None  # the reason code of every row of the batch; None: all are good
    start: int
    stop: int
    key: Key
    roles: Roles
    place: Place
    batch: pa.RecordBatch  # the batch before decoding: a quarantine stores the rows as in the source
    unseen: bool = False  # the audit checks that ids are in range and values finite
    ends: Int64 | None = None  # of an example stream: the number of gradient rows before each example of the batch
    first: int = 0  # and its examples are first to last, with rows or without
    last: int = 0

    def audited(self, sizes: Mapping[str, tuple[int, int]]) -> Piece:
        """Return the same piece after a check of every value."""
        return replace(self, bad=find_bad_rows(self.decoded.by_row(), sizes), unseen=False) if self.unseen else self

    @property
    def num_units(self) -> int:
        """Return the number of rows, or of examples: the unit of contribution_rows."""
        return self.stop - self.start if self.ends is None else self.last - self.first

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of its gradients."""
        return self.decoded.nbytes * (self.stop - self.start) // max(self.decoded.num_rows, 1)

    @property
    def units(self) -> slice:
        """Return the range of this piece in the batch's steps, contributors and rates."""
        return slice(self.start, self.stop) if self.ends is None else slice(self.first, self.last)

    def cut(self, room: int | None) -> tuple[Piece, Piece | None]:
        """Split the piece into the first rows that fit, and the rest if any."""
        if room is None or self.num_units <= room:
            return self, None
        if self.ends is None:
            at = self.start + room
            return replace(self, stop=at), replace(self, start=at)
        at = int(self.ends[self.first + room])
        return replace(self, stop=at, last=self.first + room), replace(self, start=at, first=self.first + room)


@dataclass
class Held:
    """The pieces of an incomplete frame."""

    key: Key = (None, None)
    source: str = ""
    num_rows: int = 0
    num_units: int = 0
    rows: dict[str, list[Rows]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    aside: list[pa.RecordBatch] = field(default_factory=list)
    rates: tuple[float, ...] | None = None
    truncated: int = 0
    time: int | None = None

    def copy(self) -> Held:
        """Return an independent copy."""
        rows = {table: list(blocks) for table, blocks in self.rows.items()}
        return replace(self, rows=rows, dropped=self.dropped.copy(), aside=list(self.aside))

    def frame(self, audit: Callable[[], Frame] | None) -> Frame:
        rows = {table: tuple(blocks) for table, blocks in self.rows.items()}
        step, contributor = self.key
        return Frame(
            rows,
            self.num_rows,
            step,
            contributor,
            self.rates,
            dropped=self.dropped,
            source=self.source,
            bad_rows=tuple(self.aside),
            audit=audit,
            truncated=self.truncated,
            time=self.time,
        )


class FrameBuilder:
    """Collects pieces and returns frames; buffers the one incomplete frame.

    first_bad : the first row dropped for each reason, as an error message
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self.first_bad: dict[str, str] = {}
        self._begin()

    def add(self, piece: Piece) -> Iterator[Frame]:
        """Add a piece; yield the frames that it completes. Raises InputError at a bad row."""
        if piece.key != self._held.key:
            yield from self.end()
        rest: Piece | None = piece
        while rest is not None:
            limit = self._options.contribution_rows
            here, rest = rest.cut(None if limit is None else limit - self._held.num_units)
            self._take(self._held, here)
            self._keep(here)
            if self._held.num_units == limit:
                yield from self.end()

    def end(self) -> Iterator[Frame]:
        """Complete the buffered frame, if any."""
        if self._held.num_units:
            held, pieces, sure = self._held, self._pieces, self._sure
            unseen = any(piece.unseen for piece in pieces)
            yield held.frame(partial(self._audited, sure, tuple(pieces)) if unseen else None)
            self._begin()

    def _begin(self) -> None:
        self._held = Held()
        self._sure: Held | None = None  # what has been looked at of it
        self._pieces: list[Piece] = []  # those of the frame that are not in _sure
        self._kept_bytes = 0

    def _audited(self, sure: Held | None, pieces: tuple[Piece, ...]) -> Frame:
        """Return the frame of these pieces, after the checked ones, with a check of every value."""
        sure = Held() if sure is None else sure.copy()
        for piece in pieces:
            self._take(sure, piece.audited(self._options.sizes))
        return sure.frame(None)

    def _keep(self, piece: Piece) -> None:
        """Keep a piece for the audit; but do not let rows that it would drop fill the memory of a long frame."""
        if not self._options.unseen:
            return
        self._pieces.append(piece)
        if self._options.on_bad_row == "error":
            return
        self._kept_bytes += piece.num_bytes
        if self._kept_bytes > UNSEEN_BYTES:
            sure = self._sure or Held()
            for kept in self._pieces:
                self._take(sure, kept.audited(self._options.sizes))
            self._held, self._sure, self._pieces, self._kept_bytes = sure.copy(), sure, [], 0

    def _take(self, held: Held, piece: Piece) -> None:
        if not held.num_units:
            held.key, held.source = piece.key, piece.place.source
        if piece.decoded.rates is not None:
            self._take_rates(held, piece)
        if piece.decoded.times is not None:
            _take_time(held, piece, piece.decoded.times[piece.units])
        held.num_rows += piece.stop - piece.start
        held.num_units += piece.num_units
        held.truncated += piece.decoded.truncated(piece.units)
        rows: slice | Int64 = slice(piece.start, piece.stop)
        few = False
        if piece.bad is not None and piece.bad[rows].any():
            rows = self._good_rows(held, piece, piece.bad[rows])
            # The batch need not stay in memory for them.
            few = 2 * len(rows) < piece.decoded.num_rows
        for table, block in piece.decoded.by_table(rows, self._options.sizes):
            held.rows.setdefault(table, []).append(block.copied() if few else block)

    def _good_rows(self, held: Held, piece: Piece, bad: npt.NDArray[np.uint8]) -> Int64:
        """Count the bad rows and record the first of each kind, or raise."""
        for code in np.unique(bad[bad != 0]).tolist():
            reason = REASONS[code]
            if self._options.on_bad_row == "error":
                raise _bad_row(piece, int(np.argmax(bad != 0)), self._options)
            if reason not in self.first_bad:
                self.first_bad[reason] = str(_bad_row(piece, int(np.argmax(bad == code)), self._options))
            held.dropped[reason] = held.dropped.get(reason, 0) + int((bad == code).sum())
        if self._options.on_bad_row == "quarantine":
            place = (piece.place.source, piece.place.batch, piece.place.first_row)
            held.aside += bad_rows(piece.batch, piece.decoded.by_row(), piece.roles, place, bad, piece.start)
        return piece.start + np.flatnonzero(bad == 0)

    def _take_rates(self, held: Held, piece: Piece) -> None:
        rates, roles = piece.decoded.rates, piece.roles
        if rates is None or roles.learning_rates is None:
            return
        broken = piece.decoded.no_rates
        if broken is not None and broken.row < piece.units.stop:
            raise piece.place.error(broken.row, broken.problem, broken.column)
        rates = rates[piece.units]
        wanted = rates[0] if held.rates is None else np.array(held.rates, np.float32)
        same = (rates == wanted).all(axis=1)
        if not same.all():
            row = int(np.argmin(same))
            problem = f"learning rates change inside a frame: {wanted.tolist()}, then {rates[row].tolist()}"
            raise piece.place.error(piece.units.start + row, problem, roles.learning_rates.name)
        held.rates = tuple(wanted.tolist())


def _take_time(held: Held, piece: Piece, times: Int64) -> None:
    """Take the time of a frame, which all of its rows must have."""
    assert piece.roles.time is not None
    column = piece.roles.time.name
    first = int(times[0]) if held.time is None else held.time
    for bad, problem in (
        (times < 0, f"expected seconds from 0 to {MAX_TIME}, constant within a frame, got"),
        (times != first, f"the time changes inside a frame: {first}, then"),
    ):
        if bad.any():
            row = piece.start + int(np.argmax(bad))
            value = piece.batch.column(column)[row].as_py()
            unit = "; are these milliseconds or less?" if value is not None and value > MAX_TIME else ""
            raise piece.place.error(row, f"{problem} {'null' if value is None else value}{unit}", column)
    held.time = first


def run_keys(decoded: Content, num_rows: int | None = None) -> Iterator[tuple[int, int, Key]]:
    """Return the runs of equal (step, contributor) of a batch's rows, or of the first rows: (start, stop, key)."""
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


def _key(decoded: Content, row: int) -> Key:
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
    problem, column = explain(piece.decoded.by_row(), row, code, options.sizes, piece.roles)
    return piece.place.error(row, problem, column, REASONS[code])
