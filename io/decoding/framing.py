"""Convert decoded batches to pieces of one key, and pieces to frames.

A frame takes pieces until the key changes, it is full, or metadata marks its end. A bad row stops the
reading when its frame ends, not before: every complete frame before it has been returned,
for any division of the stream into batches. This module opens and reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from penstock.base.errors import InputError, listed
from penstock.io.decoding.bad_rows import quarantined
from penstock.io.decoding.columns import Int64
from penstock.io.decoding.frame_columns import Key
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.row_checks import REASONS, SUM_NOT_FINITE, Sizes
from penstock.io.decoding.source_batch import BadRows, SourceBatch
from penstock.io.sources.batch import data_bytes
from penstock.model.frames import Frame, FrameRun, Overflows, Position, Rows, time_problem
from penstock.pyx.gradient_blocks import GradientBlocks

# The size of a frame's unvalidated gradients, if bad rows are dropped: beyond it the frame is validated while it is
# still incomplete, so that memory does not grow with rows that will be dropped. Of batches that are mostly bad rows no
# more are kept for the case that a sum leaves the finite range.
UNVALIDATED_BYTES = 64 << 20
# A batch whose buffers are larger is measured exactly: it may be a slice of a large table.
_MEASURED_BYTES = 1 << 20


@dataclass(eq=False)
class FramePiece:
    """Rows of one key of a batch: examples of an example stream, which may have no gradient rows."""

    batch: SourceBatch
    start: int
    stop: int
    key: Key

    @property
    def num_units(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of its columns."""
        data = self.batch.raw.data
        num_bytes = data.get_total_buffer_size()  # a fiftieth of the time of ``nbytes``, but a slice counts whole
        if num_bytes > _MEASURED_BYTES:
            num_bytes = data_bytes(data)
        return int(num_bytes * self.num_units // data.num_rows)

    def split(self, room: int | None) -> tuple[FramePiece, FramePiece | None]:
        """Split the piece into the first rows that fit, and the rest if any."""
        if room is None or self.num_units <= room:
            return self, None
        row = self.start + room
        return replace(self, stop=row), replace(self, start=row)

    def validated(self, sizes: Sizes) -> FramePiece:
        return replace(self, batch=self.batch.validated(sizes))


@dataclass(eq=False)
class PlainPieces:
    """All rows of neighbouring plain batches, at least one.

    blocks : of one batch each; batch_of : returns the batch of a block, given its number and the rows before it
    bounds : int64 (pieces + 1,), where the key changes, or a batch ends; steps : int64 (pieces,), None: there are none
    """

    table: str
    blocks: GradientBlocks
    batch_of: Callable[[int, int], SourceBatch]
    bounds: Int64
    steps: Int64 | None
    _last: tuple[int, SourceBatch] | None = None  # the block that was used last, and its batch

    def key(self, number: int) -> Key:
        return None if self.steps is None else int(self.steps[number]), None

    def piece(self, number: int) -> FramePiece:
        """Return one of the pieces; -1 is the last one."""
        number %= len(self.bounds) - 1
        start, stop = int(self.bounds[number]), int(self.bounds[number + 1])
        block, before = self.blocks.block_at(start)
        if self._last is None or self._last[0] != block:
            self._last = block, self.batch_of(block, before)
        return FramePiece(self._last[1], start - before, stop - before, self.key(number))

    def limited(self, num_rows: int, first: int) -> PlainPieces:
        """Return pieces of so many rows each, as many as are whole, from a row on. Only of one block without steps."""
        if first == 0 and num_rows == self.bounds[-1]:
            return self
        return replace(self, bounds=np.arange(first, int(self.bounds[-1]) + 1, num_rows))


class PartialFrame:
    """The contents of a frame, piece by piece. num_units : of its pieces

    first_bad : the first row dropped for each reason, as an error message
    """

    def __init__(self, options: ReadOptions, first_bad: dict[str, str]) -> None:
        self._options, self._first_bad = options, first_bad
        self.key: Key = (None, None)
        self.num_units = 0
        self._source = ""
        self._num_rows = self._truncated = 0
        self._rows: dict[str, list[Rows]] = {}
        self._dropped: dict[str, int] = {}
        self._bad_rows: list[pa.RecordBatch] = []
        self._rates: tuple[float, ...] | None = None
        self._time: int | None = None
        self._position: Position = ()
        # For ``_without``: the validated pieces, None for one that is not kept; of each block its piece, and there the
        # number of the RowBatch and the rows.
        self._pieces: list[FramePiece | None] = []
        self._origins: dict[str, list[tuple[int, int, slice | Int64]]] = {}
        self._num_bytes_few = 0

    def add(self, piece: FramePiece) -> None:
        """Add a piece. Raises InputError at a bad row, if those are errors, and where learning rates change."""
        batch = piece.batch
        if not self.num_units:
            self.key, self._source = piece.key, batch.raw.source
        if batch.raw.after is not None:
            self._position = batch.raw.after(piece.stop)
        if batch.plain is not None:
            self.num_units += piece.num_units
            self._num_rows += piece.num_units
            for first, end, table, rows_of_run in batch.plain:
                start, stop = max(first, piece.start), min(end, piece.stop)
                if start < stop:
                    self._rows.setdefault(table, []).append(rows_of_run.span(start - first, stop - first))
            return
        content = batch.content
        if content.frame_columns.rates is not None:
            self._add_rates(piece)
        if content.frame_columns.times is not None:
            self._add_time(piece, content.frame_columns.times[piece.start : piece.stop])
        self.num_units += piece.num_units
        if content.truncated is not None:
            self._truncated += int(content.truncated[piece.start : piece.stop].sum())
        self._pieces.append(piece)
        bad = None if batch.bad is None else batch.bad_rows(piece.start, piece.stop)
        if bad is not None:
            self._drop(batch, bad)
        for number, rows in enumerate(content.row_batches):
            span = rows.span(piece.start, piece.stop)
            self._num_rows += span.stop - span.start
            selected: slice | Int64 = span
            few = False
            if bad is not None and batch.bad is not None and (codes := batch.bad[number]) is not None:
                selected = good = span.start + np.flatnonzero(codes[span] == 0)
                # The batch need not stay in memory for them.
                few = 2 * len(good) < rows.num_rows
                if few and not self._keeps(piece):
                    self._pieces[-1] = None
            for table, of_table, block in rows.by_table(selected, self._options.sizes):
                self._rows.setdefault(table, []).append(block.copied() if few else block)
                self._origins.setdefault(table, []).append((len(self._pieces) - 1, number, of_table))

    def build(self, audit: Callable[[], Frame] | None) -> Frame:
        step, contributor = self.key
        return Frame(
            {table: tuple(blocks) for table, blocks in self._rows.items()},
            self._num_rows,
            step,
            contributor,
            self._rates,
            dropped=self._dropped,
            source=self._source,
            bad_rows=tuple(self._bad_rows),
            audit=audit,
            reject=self._without if audit is None else None,
            truncated=self._truncated,
            time=self._time,
            position=self._position,
            drops=self._options.on_bad_row != "error",
        )

    def _keeps(self, piece: FramePiece) -> bool:
        """Return whether a piece whose rows are mostly bad is kept."""
        self._num_bytes_few += piece.num_bytes
        return self._num_bytes_few <= UNVALIDATED_BYTES

    def _without(self, overflows: Overflows) -> Frame:
        """Return the frame without rows at which a sum leaves the finite range, or raise InputError."""
        pieces = [piece for piece in self._pieces if piece is not None]
        if len(pieces) < len(self._pieces):
            tables = listed(table for table, masks in overflows.items() if any(mask.any() for mask in masks))
            problem = f"a sum of table {tables} is not finite as float32, in a large frame of mostly bad rows"
            raise InputError(problem, source=self._source, reason=REASONS[SUM_NOT_FINITE])
        for table, masks in overflows.items():
            for (number, batch_number, rows), mask in zip(self._origins[table], masks, strict=True):
                if mask.any():
                    piece = pieces[number]
                    positions = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
                    batch = piece.batch.marked(batch_number, positions[mask], SUM_NOT_FINITE)
                    pieces[number] = replace(piece, batch=batch)
        frame = PartialFrame(self._options, self._first_bad)
        for piece in pieces:
            frame.add(piece)
        return frame.build(None)

    def _drop(self, batch: SourceBatch, bad: BadRows) -> None:
        """Count the bad rows and record the first of each kind, or raise."""
        sizes = self._options.sizes
        if self._options.on_bad_row == "error":
            raise batch.error(bad, 0, sizes)
        for code, first, count in zip(*np.unique(bad.codes, return_index=True, return_counts=True), strict=True):
            reason = REASONS[code]
            if reason not in self._first_bad:
                self._first_bad[reason] = str(batch.error(bad, first, sizes))
            self._dropped[reason] = self._dropped.get(reason, 0) + int(count)
        if self._options.on_bad_row == "quarantine":
            self._bad_rows += quarantined(batch, bad)

    def _add_time(self, piece: FramePiece, times: Int64) -> None:
        """Take the time of a frame, which all of its rows must have."""
        batch, field = piece.batch.raw, piece.batch.roles.time
        assert field is not None
        if (times < 0).any():
            row = piece.start + int(np.argmax(times < 0))
            raise batch.error(row, time_problem(batch.data.column(field.name)[row].as_py()), field.name)
        self._time = first = int(times[0]) if self._time is None else self._time
        if (times != first).any():
            offset = int(np.argmax(times != first))
            problem = f"the time changes inside a frame: {first}, then {times[offset]}"
            raise batch.error(piece.start + offset, problem, field.name)

    def _add_rates(self, piece: FramePiece) -> None:
        columns, batch, roles = piece.batch.content.frame_columns, piece.batch.raw, piece.batch.roles
        assert columns.rates is not None
        assert roles.learning_rates is not None
        broken = columns.no_rates
        if broken is not None and broken.row < piece.stop:
            raise batch.error(broken.row, broken.problem, broken.column)
        rates = columns.rates[piece.start : piece.stop]
        expected = rates[0] if self._rates is None else np.array(self._rates, np.float32)
        same = (rates == expected).all(axis=1)
        if not same.all():
            row = int(np.argmin(same))
            problem = f"learning rates change inside a frame: {expected.tolist()}, then {rates[row].tolist()}"
            raise batch.error(piece.start + row, problem, roles.learning_rates.name)
        self._rates = tuple(expected.tolist())


class FrameBuilder:
    """Collects pieces and returns frames; buffers the one incomplete frame. first_bad : see ``PartialFrame``

    num_unchecked : of the first frames, bad rows are dropped
    """

    def __init__(self, options: ReadOptions, first_bad: dict[str, str], num_unchecked: int = 0) -> None:
        self._options = self._checking = options
        self._first_bad, self._num_unchecked = first_bad, num_unchecked
        if num_unchecked:
            self._options = replace(options, on_bad_row="drop")
        self._plain: PlainPieces | None = None  # whose last piece is the buffered frame so far
        self._begin()

    def add(self, piece: FramePiece | PlainPieces, is_whole: bool = False) -> Iterator[FrameRun]:
        """Add a piece; yield the frames that it completes.

        is_whole : whether the frame of the batch's last row ends with it; ``end`` must follow
        Raises InputError at a bad row.
        """
        if not isinstance(piece, PlainPieces):
            return self._add_piece(piece)
        limit = self._options.frame_rows
        return self._add_plain(piece, is_whole) if limit is None else self._add_limited(piece, limit)

    def _add_piece(self, piece: FramePiece) -> Iterator[FrameRun]:
        self._take_last()
        if self._frame.num_units and piece.key != self._frame.key:
            yield FrameRun.of(self._build())
        limit = self._options.frame_rows
        rest: FramePiece | None = piece
        while rest is not None:
            here, rest = rest.split(None if limit is None else limit - self._frame.num_units)
            self._add(here)
            if self._frame.num_units == limit:
                yield FrameRun.of(self._build())

    def end(self) -> Iterator[FrameRun]:
        """Complete the buffered frame, if any."""
        if self._plain is not None:
            plain, self._plain = self._plain, None
            num_pieces = len(plain.bounds) - 1
            yield self._run(plain, num_pieces - 1, num_pieces)
        elif self._frame.num_units:
            yield FrameRun.of(self._build())

    def _add_plain(self, pieces: PlainPieces, is_whole: bool) -> Iterator[FrameRun]:
        """Add pieces: the first may continue a frame, and the last may be continued. Those between are whole frames."""
        first, stop = 0, len(pieces.bounds) - 1
        if self._plain is not None and self._plain.key(-1) == pieces.key(0):
            self._take_last()
        if self._frame.num_units and self._frame.key == pieces.key(0):
            self._add(pieces.piece(0))
            first = 1
        if first < stop and (self._plain is not None or self._frame.num_units):
            yield from self.end()
        last = stop if is_whole else stop - 1
        if first < last:
            yield self._run(pieces, first, last)
        if max(first, last) < stop:
            self._plain = pieces

    def _add_limited(self, pieces: PlainPieces, limit: int) -> Iterator[FrameRun]:
        """Add pieces, of which no more than ``limit`` rows are a frame."""
        if pieces.steps is not None:
            for number in range(len(pieces.steps)):
                yield from self._add_piece(pieces.piece(number))
            return
        # The piece of all rows is made only where a frame has rows of several batches.
        num_rows, num_before = int(pieces.bounds[-1]), self._frame.num_units
        if num_before and self._frame.key != pieces.key(0):
            yield FrameRun.of(self._build())
            num_before = 0
        first = limit - num_before if num_before else 0
        if first + limit > num_rows:  # at most one frame ends here
            yield from self._add_piece(pieces.piece(0))
            return
        if first:
            yield from self._add_piece(replace(pieces.piece(0), stop=first))
        limited = pieces.limited(limit, first)
        yield self._run(limited, 0, len(limited.bounds) - 1)
        begin = int(limited.bounds[-1])
        if begin < num_rows:
            yield from self._add_piece(replace(pieces.piece(0), start=begin))

    def _take_last(self) -> None:
        """Buffer the piece that may be continued as those of other frames."""
        if self._plain is not None:
            plain, self._plain = self._plain, None
            self._add(plain.piece(-1))

    def _run(self, pieces: PlainPieces, first: int, stop: int) -> FrameRun:
        """Return pieces that are whole frames."""

        num_unchecked = self._num_unchecked

        def frame_at(number: int) -> Frame:
            builder = FrameBuilder(self._checking, self._first_bad, max(0, num_unchecked - number))
            builder._add(pieces.piece(first + number))
            return builder._build()

        self._built(stop - first)
        blocks, bounds, steps = pieces.blocks, pieces.bounds, pieces.steps
        if first or stop < len(bounds) - 1 or bounds[0]:
            bounds, steps = bounds[first : stop + 1], None if steps is None else steps[first:stop]
            blocks, bounds = blocks.span(int(bounds[0]), int(bounds[-1])), bounds - bounds[0]
        return FrameRun(pieces.table, blocks, bounds, steps, frame_at)

    def _build(self) -> Frame:
        pieces, options = tuple(self._pieces), self._options
        frame = self._frame.build((lambda: self._validated(pieces, options).build(None)) if self._unvalidated else None)
        self._begin()
        self._built(1)
        return frame

    def _built(self, num_frames: int) -> None:
        if self._num_unchecked:
            self._num_unchecked = max(0, self._num_unchecked - num_frames)
            if not self._num_unchecked:
                self._options = self._checking
                self._begin()

    def _begin(self) -> None:
        self._frame = PartialFrame(self._options, self._first_bad)
        self._pieces: list[FramePiece] = []  # of the frame, for its audit
        self._unvalidated = False  # whether one of them is
        self._num_bytes = 0

    def _add(self, piece: FramePiece) -> None:
        """Add a piece, after a check of every value if the frame is so long that its bad rows may fill the memory."""
        options = self._options
        if self._num_bytes > UNVALIDATED_BYTES:
            self._frame.add(piece.validated(options.sizes))
            return
        try:
            self._frame.add(piece)
        except InputError:
            self._validated(self._pieces, options)  # an earlier row may be bad, and then its error is the frame's
            raise
        if options.unvalidated:
            self._pieces.append(piece)
            self._unvalidated = self._unvalidated or piece.batch.unvalidated
            if options.on_bad_row != "error":
                self._num_bytes += piece.num_bytes
                if self._num_bytes > UNVALIDATED_BYTES:
                    self._frame = self._validated(self._pieces, options)
                    self._pieces, self._unvalidated = [], False

    def _validated(self, pieces: Sequence[FramePiece], options: ReadOptions) -> PartialFrame:
        """Return the frame of these pieces after a check of every value."""
        frame = PartialFrame(options, self._first_bad)
        for piece in pieces:
            frame.add(piece.validated(options.sizes))
        return frame
