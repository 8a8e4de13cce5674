"""The values in the data path: Frame → Coalesced. Immutable and validated; numpy only.

A frame is validated when it is built: ids lie inside their tables, gradients are finite and as long as their table's
dim. A frame with an ``audit`` still needs the first two checks: the kernel that sums its rows reads every value anyway,
and undoes the sums if one is bad. Finite rows may have a sum that is not: ``Frame.reject`` is for these.
"""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.pyx.buffer_pool import Sums
from penstock.pyx.gradient_blocks import GradientBlocks

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Contributor = int | str | None
# Rows at which a sum leaves the finite range: by table, for each of its blocks a bool mask.
Overflows = Mapping[str, Sequence[npt.NDArray[np.bool_]]]
Position = tuple[int, ...]  # in a source that can seek: the number of a message; or a version, a file and a row

# What the columns of a row stream are for.
ROLES = ("id", "gradient", "table", "step", "contributor", "learning_rates", "time")

# Counts by contributor must not grow for as long as a service runs.
MAX_CONTRIBUTORS, MOST_NAMED = 1000, 8

SUM_NOT_FINITE = "sum_not_finite"  # the reason why a row is dropped

MAX_TIME = 2**32 - 2  # seconds: the largest clock of a dynamic table

# These classes are immutable by convention, not ``frozen``: there are thousands a second, and a frozen Frame takes six
# times as long to create.


@dataclass(eq=False)
class Rows:
    """Gradient rows of one table in arrival order.

    ids : int64, shape (n,)
    grads : float32, shape (m, dim), rows contiguous; may be a view of Arrow's memory
    which : int64, shape (n,), the row of grads for each id; None: all rows in order, m is n
    gains : float32, shape (n,), the factor that each row is multiplied by when it is summed; None: no factors
    counts : int64, shape (n,), how many rows each row is the sum of, ids being distinct; None: one
    is_own : whether nobody else writes to their memory, which has nothing else that is large
    """

    ids: Int64
    grads: Float32
    which: Int64 | None = None
    gains: Float32 | None = None
    counts: Int64 | None = None
    is_own: bool = False

    def gradient(self, row: int | Int64) -> Float32:
        """Return the gradient of one row, float32 (dim,), or of k rows, float32 (k, dim)."""
        gradient: Float32 = self.grads[row if self.which is None else self.which[row]]
        if self.gains is None:
            return gradient
        with np.errstate(over="ignore", invalid="ignore"):  # summing reports values that are not finite
            gained: Float32 = gradient * np.expand_dims(self.gains[row], -1)
        return gained

    def span(self, start: int, stop: int) -> Rows:
        """Return the rows from start to stop, without a copy; only of rows in order, without gains."""
        assert self.which is None
        assert self.gains is None
        whole = start == 0 and stop == len(self.ids)
        return self if whole else Rows(self.ids[start:stop], self.grads[start:stop])

    def selected(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Return some of the rows, whose gradients stay where they are."""
        indices = np.flatnonzero(mask)
        gains = None if self.gains is None else self.gains[indices]
        return Rows(self.ids[indices], self.grads, indices if self.which is None else self.which[indices], gains)

    def copied(self) -> Rows:
        """Return a copy that does not reference the memory of the original, unless that is its own."""
        if self.is_own:
            return self
        grads = self.grads.copy() if self.which is None else self.grads[self.which]  # np.take would copy windows first
        which = None if self.gains is None else np.arange(len(self.ids))
        return Rows(self.ids.copy(), grads, which, self.gains, is_own=True)


@dataclass(eq=False)
class Frame:
    """The contribution of one producer to one of its steps.

    rows : by table, the blocks of the contribution in arrival order; only tables that occur
    num_rows : gradient rows read for it, including dropped ones
    local_step : the producer's step; None: never stale
    contributor : the producer, or None
    learning_rates : one value per dynamic tag; None: the stream has none
    dropped : reason → number of dropped rows
    source : the source of the frame, for messages
    bad_rows : the dropped rows as Arrow record batches, if they are to be quarantined
    audit : returns the frame after a check of every value, which raises InputError or drops rows; None: checked already
    reject : returns the frame without some rows at which a sum leaves the finite range, or raises InputError; None:
        ``drops`` says which. Only of a frame without an audit
    truncated : number of ids beyond ``max_sequence_length``; they do not count as rows
    time : seconds, of the stream's column ``time``; None: it has none
    position : where its source continues after it, if the source can seek; else ()
    drops : whether rows at which a sum leaves the finite range are dropped; else they are errors
    is_void : it stands for a message without a frame, which counts in ``dropped`` and is not applied; without a
        position, for a pause in which no frame arrives
    fingerprint : of the whole frame, for source positions, if these rows are only a part of it; None: they are all; "":
        positions are counted elsewhere
    """

    rows: Mapping[str, tuple[Rows, ...]]
    num_rows: int
    local_step: int | None = None
    contributor: int | str | None = None
    learning_rates: tuple[float, ...] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    bad_rows: tuple[Any, ...] = ()
    audit: Callable[[], Frame] | None = None
    reject: Callable[[Overflows], Frame] | None = None
    truncated: int = 0
    fingerprint: str | None = None
    time: int | None = None
    position: Position = ()
    is_void: bool = False
    drops: bool = False

    def audited(self) -> Frame:
        """Return this frame, fully validated. Raises InputError."""
        return self if self.audit is None else self.audit()

    def named(self, contributor: Contributor) -> Frame:
        """Return this frame with a contributor, if it has none."""
        return self if contributor is None or self.contributor is not None else self._changed(contributor=contributor)

    def with_rates(self, rates: tuple[float, ...]) -> Frame:
        """Return this frame with learning rates."""
        return self._changed(learning_rates=rates)

    def _changed(self, **fields: Any) -> Frame:
        """Return this frame with other values of some fields, which it keeps without its bad rows, too."""
        audit = self.audit and (lambda: replace(self.audited(), **fields))
        reject = self.reject and (lambda overflows: replace(self.without(overflows), **fields))
        return self.with_(**fields, audit=audit, reject=reject)

    def with_(self, **fields: Any) -> Frame:
        """Return this frame with other values of some fields, as ``replace`` does in ten times the time."""
        frame = Frame.__new__(Frame)
        frame.__dict__.update(self.__dict__, **fields)
        return frame

    def without(self, overflows: Overflows) -> Frame:
        """Return this frame, which has no audit, without rows at which a sum leaves the finite range.

        Its digest stays that of the whole frame. Raises InputError where such rows are errors.
        """
        if self.reject is not None:
            return replace(self.reject(overflows), fingerprint=fingerprint(self))
        if not self.drops:
            raise sum_error(self, overflows)
        kept, num_dropped = dict(self.rows), 0
        for table, masks in overflows.items():
            num_dropped += sum(int(mask.sum()) for mask in masks)
            pairs = zip(self.rows[table], masks, strict=True)
            kept[table] = tuple(block.selected(~mask) if mask.any() else block for block, mask in pairs)
        return replace(self, rows=kept, dropped={SUM_NOT_FINITE: num_dropped}, fingerprint=fingerprint(self))


@dataclass(eq=False)
class FrameRun:
    """Whole frames of a source, one after the other: plain ones, or one of any kind.

    Plain frames are rows of one table, of which none is audited; none has a contributor, learning rates, a time or
    dropped rows.

    table, blocks : of plain frames, and the rows of all of them, in order; else "" and None
    bounds : int64, shape (frames + 1,), the rows before each frame, which lies in one block
    steps : int64, shape (frames,), the local step of each plain frame; None: none has one
    make : returns one of the plain frames; only : the one frame of any kind, with no ``make``
    positions : where the source continues after each frame, if it can seek; else ()

    next : the first frame that was not handled yet. The source yields the run again until all frames are handled; a
        consumer that handles several at once increases it
    """

    table: str
    blocks: GradientBlocks | None
    bounds: Int64
    steps: Int64 | None
    make: Callable[[int], Frame] | None
    positions: Sequence[Position] = ()
    next: int = 0
    only: Frame | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @classmethod
    def of(cls, frame: Frame) -> FrameRun:
        """Return a frame of any kind as a run of one."""
        return cls("", None, _bounds_of(frame.num_rows), None, None, (frame.position,), 0, frame)

    def frame_at(self, number: int) -> Frame:
        """Return one of the frames."""
        if self.only is not None:
            return self.only
        assert self.make is not None
        return self.make(number)

    def frame(self) -> Frame:
        """Return the next frame."""
        return self.frame_at(self.next)

    @property
    def local_step(self) -> int | None:
        return self.frame().local_step

    @property
    def is_void(self) -> bool:
        """Return whether it stands for a message without a frame, or for a pause."""
        return self.only is not None and self.only.is_void

    def plain(self, most_rows: int) -> FrameRun | None:
        """Return the frames as plain ones; None if they are none, or the next one has more rows."""
        if self.only is not None:
            return _plain(self.only) if self.only.num_rows <= most_rows else None
        return self if self.bounds[self.next + 1] - self.bounds[self.next] <= most_rows else None

    def alone(self, frame: Frame) -> FrameRun:
        """Return a frame as a run of one: this run if it is that."""
        return self if self.only is frame else FrameRun.of(frame)

    def handled(self) -> Iterator[FrameRun]:
        """Yield the run until all frames are handled."""
        num_frames = len(self)
        while self.next < num_frames:
            first = self.next
            yield self
            self.next = max(self.next, first + 1)

    def may_join(self, other: FrameRun) -> bool:
        if self.blocks is None or other.blocks is None:
            return False
        return self.table == other.table and (self.steps is None) == (other.steps is None)

    @classmethod
    def joined(cls, runs: Sequence[FrameRun]) -> FrameRun:
        """Return the frames of several runs as one. They may join."""
        if len(runs) == 1:
            return runs[0]
        counts, several = [len(run) for run in runs], [run.blocks for run in runs if run.blocks is not None]
        frames_before, rows_before = (np.cumsum([0, *sizes]) for sizes in (counts, [b.num_rows for b in several]))
        bounds = np.concatenate([*[run.bounds[:-1] for run in runs], rows_before[-1:]])
        bounds[:-1] += np.repeat(rows_before[:-1], counts)

        def frame_at(number: int) -> Frame:
            index = int(np.searchsorted(frames_before, number, side="right")) - 1
            return runs[index].frame_at(number - int(frames_before[index]))

        steps = None if runs[0].steps is None else np.concatenate([run.steps for run in runs if run.steps is not None])
        positions = [position for run in runs for position in run.positions]
        return cls(runs[0].table, GradientBlocks.joined(several), bounds, steps, frame_at, positions)


NO_FRAMES = FrameRun("", None, np.zeros(1, np.int64), None, None)


def _plain(frame: Frame) -> FrameRun | None:
    """Return a frame as a run of one plain frame; None if it is none."""
    if frame.audit is None or len(frame.rows) != 1 or frame.dropped or frame.truncated:
        return None
    if frame.contributor is not None or frame.learning_rates is not None or frame.time is not None:
        return None
    ((table, (rows, *others)),) = frame.rows.items()
    if others or rows.which is not None or rows.gains is not None or rows.counts is not None:
        return None
    steps = None if frame.local_step is None else np.array([frame.local_step])
    blocks = GradientBlocks.of_arrays([(rows.ids, rows.grads)])
    return FrameRun(table, blocks, _bounds_of(len(rows.ids)), steps, lambda _: frame, [frame.position])


@lru_cache
def _bounds_of(num_rows: int) -> Int64:
    return np.array([0, num_rows])


def sum_problem(table: str, key: int) -> str:
    """Return what is wrong with a row at which the sum of an id leaves the finite range."""
    return f"expected a sum that is finite as float32, and with this row that of id {key} of table '{table}' is not"


def sum_error(frame: Frame, overflows: Overflows) -> InputError:
    """Return the error of the first row at which a sum leaves the finite range: its table, and there the row."""
    table = next(table for table, masks in overflows.items() if any(mask.any() for mask in masks))
    row = int(np.flatnonzero(np.concatenate(overflows[table]))[0])
    key = int(np.concatenate([block.ids for block in frame.rows[table]])[row])
    in_order = all(block.which is None for block in frame.rows[table])
    return InputError(
        sum_problem(table, key), source=frame.source, row=row if in_order else None, reason=SUM_NOT_FINITE
    )


def fingerprint(frame: Frame) -> str:
    """Return the text of one frame that its digest covers. A frame that holds a share of its rows already has it.

    It contains the step, the contributor, and per table the ids and the first and last gradient: a pass over all
    gradients would cost as much as their sum. The ids are reduced to a CRC-32 (3 GB/s; BLAKE2b 0.65) per table.
    """
    if frame.fingerprint is not None:
        return frame.fingerprint
    text = [repr(frame.local_step), repr(frame.contributor), str(frame.num_rows), repr(frame.learning_rates)]
    for table in sorted(frame.rows):
        crc, blocks = 0, [block for block in frame.rows[table] if len(block.ids)]
        for block in blocks:
            crc = zlib.crc32(np.ascontiguousarray(block.ids).data, crc)
        ends = (blocks[0].gradient(0).tobytes(), blocks[-1].gradient(-1).tobytes()) if blocks else ()
        text += [repr(table), str(crc), *(end.hex() for end in ends)]
    return "\0".join(text)


class SummedArrays:
    """Distinct ids int64 (u,) and their sums float32 (u, dim). ``Sums`` is the same, converted to arrays lazily.

    rows : how many rows each id has, int64 (u,); None: not counted
    frames : how many frames contain each id, int64 (u,), if the sums are still to be divided by that; else None
    """

    __slots__ = ("frames", "ids", "num_ids", "rows", "sums")

    def __init__(self, ids: Int64, sums: Float32, rows: Int64 | None = None, frames: Int64 | None = None) -> None:
        self.ids, self.sums, self.rows, self.frames, self.num_ids = ids, sums, rows, frames, len(ids)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.ids, self.sums))

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.sums.nbytes


Summed = Sums | SummedArrays


class Coalesced:
    """One table's gradients of one opening.

    summed : ids int64 (u,) and rows float32 (u, dim), summed, and divided if the reduction is mean; each id occurs once
        in all of them
    """

    __slots__ = ("num_ids", "summed")

    def __init__(self, summed: tuple[Summed, ...]) -> None:
        self.summed = summed
        self.num_ids = 0
        for part in summed:
            self.num_ids += part.num_ids

    @classmethod
    def of_no_rows(cls, dim: int) -> Coalesced:
        """Return the gradients of a table that nothing touched."""
        return cls((SummedArrays(np.zeros(0, np.int64), np.zeros((0, dim), np.float32)),))

    @property
    def ids(self) -> Int64:
        """All ids, part by part."""
        return self.summed[0].ids if len(self.summed) == 1 else np.concatenate([part.ids for part in self.summed])

    @property
    def parts(self) -> tuple[tuple[Int64, Float32], ...]:
        """``summed`` as arrays: (ids int64 (u,), sums float32 (u, dim)) each."""
        return tuple([(part.ids, part.sums) for part in self.summed])


def count_by(counts: Counter[Contributor], contributor: Contributor) -> None:
    """Count one more of a contributor; after MAX_CONTRIBUTORS names, new ones count together as "others"."""
    if contributor not in counts and len(counts) >= MAX_CONTRIBUTORS:
        contributor = "others"
    counts[contributor] = counts.get(contributor, 0) + 1  # += calls a function in Python for a new contributor


def largest_counts(counts: Mapping[Contributor, int]) -> str:
    """Return ``0: 2, 'b': 1, unnamed: 1``, the largest first; after MOST_NAMED only the number of the others."""
    largest = sorted(counts.items(), key=lambda item: -item[1])
    text = ", ".join(f"{'unnamed' if who is None else repr(who)}: {n}" for who, n in largest[:MOST_NAMED])
    return text + (f" and {len(largest) - MOST_NAMED} more" if len(largest) > MOST_NAMED else "")


def time_problem(value: int | None) -> str:
    """Return what is wrong with a time that is null or outside of 0 to MAX_TIME."""
    problem = (
        f"expected seconds from 0 to {MAX_TIME}, constant within a frame, got {'null' if value is None else value}"
    )
    if value is not None and value > MAX_TIME:
        for unit, per_second in (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
            if value // per_second <= MAX_TIME:
                return f"{problem}; these may be {unit}: divide by {per_second}"
    return problem


def time_given(time: Any, is_needed: bool, source: str) -> int | None:
    """Return the time of a frame, an argument. Raises InputError, also if a table needs it and it is missing."""
    if time is None:
        if is_needed:
            raise InputError("expected time=, in seconds: the clock of a dynamic table needs it", source=source)
        return None
    try:
        if isinstance(time, bool):
            raise TypeError
        seconds = operator.index(time)
    except TypeError:
        raise InputError(f"expected time=, an integer, in seconds, got {time!r}", source=source) from None
    if not 0 <= seconds <= MAX_TIME:
        raise InputError(time_problem(seconds), source=source)
    return seconds
