"""Convert sources to frames, each validated in full, or returned with a function that validates it later.

A frame is the longest run of rows with equal (step, contributor). Without ``step`` a record batch is a frame if batches
delimit frames, and a change of contributor ends one too; ``contribution_rows`` ends a frame after that many rows, or
with its record batch. The reader returns the last frame of a source only after it has verified the source's end.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain, repeat
from typing import Any, TypeVar

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, listed
from penstock.base.validation import INT64_MIN
from penstock.io.decoding.batch_pieces import MAX_ROWS_AHEAD, BatchPieces
from penstock.io.decoding.framing import FrameBuilder
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.sources.opening import Source, open_sources
from penstock.io.sources.seekable_source import SeekableSource, check_order
from penstock.model.frames import Frame, FrameRun

__all__ = ["FrameReader", "ReadOptions"]

# Rows of a frame that has no step: few producers send so many at once.
MANY_ROWS = 65_536

Frames = Generator[Frame, None, None]
Runs = Generator[FrameRun, None, None]
Numbered = Generator[tuple[int, Frame], None, None]
Item = TypeVar("Item", Frame, FrameRun)
NumberedRuns = Generator[tuple[int, FrameRun], None, None]


class FrameReader:
    """Iterate to get the frames of a source, or of several in the order given, merged by step, or in turn.

    first_bad : the first row dropped for each reason, as an error message
    checksums : of what has been read, whether it carries checksums: True, False or both
    first_source : whose turn it is, where sources are read in turn
    unchecked : of every source, how many of its first frames may have rows that do not fit the tables: they are dropped
    is_idle : whether the last void frame stands for a pause as long as pauses become
    """

    def __init__(self, source: Any, options: ReadOptions) -> None:
        self.options = options
        self.sources = open_sources(source, options.allow_missing_end, options.as_files, options.patience)
        check_order(self.sources, options.merge, options.follow)
        self._merge = None if options.merge == "round" and len(self.sources) == 1 else options.merge
        self.first_source = 0
        self.unchecked: Sequence[int] = ()
        self.is_idle = False
        self.first_bad: dict[str, str] = {}
        self._reading = 0
        self._unread: dict[str, None] = {}  # names of columns, in order
        self._maybe_step: dict[str, None] = {}
        self.without_table: dict[str, None] = {}  # parts whose rows name no table, of several
        self._verified: list[bool] = []  # of the sources read to their end
        self.checksums: set[bool] = set()

    def __iter__(self) -> Frames:
        with closing(self.numbered()) as numbered:
            for _, frame in numbered:
                yield frame

    def numbered(self) -> Numbered:
        """Return the frames, each with the number of its source. They may include void ones."""
        with closing(self.numbered_runs()) as numbered:
            for number, run in numbered:
                yield number, run.frame()

    def numbered_runs(self) -> NumberedRuns:
        """Return the frames in runs, each until all of its frames are handled.

        All frames of a run are read, and the next one of each source is the one after it.
        """
        self._verified = []
        self.checksums = set()
        seekable = {number: source for number, source in enumerate(self.sources) if isinstance(source, SeekableSource)}
        return self._growing_sources(seekable) if seekable else self._in_order(range(len(self.sources)))

    def _in_order(self, only: Container[int]) -> NumberedRuns:
        """Return the frames that the sources have now. only : numbers of the sources to read"""
        by_source = [
            self._runs(number, source) if number in only else _nothing() for number, source in enumerate(self.sources)
        ]
        if self._merge is None:
            return in_order(by_source, None)
        if self._merge == "step":
            return in_order([_sorted(runs) for runs in by_source], "step")
        return in_order([_alone(runs) for runs in by_source], "round", self.first_source)

    def _growing_sources(self, growing: Mapping[int, SeekableSource]) -> NumberedRuns:
        """Yield what the sources have and, if the run follows them, what those that grow have got since."""
        only: Container[int] = range(len(self.sources))
        longest_s = min(source.pause_s for source in growing.values())
        pause_s = 0.0
        try:
            while True:
                for source in growing.values():
                    source.fix_end()
                found_none = True
                with closing(self._in_order(only)) as numbered:
                    for run in numbered:
                        found_none = False
                        yield run
                if not self.options.follow:
                    return
                only = growing
                if not found_none:
                    pause_s = 0.0
                    continue
                pause_s = min(2 * pause_s or min(each.shortest_pause_s for each in growing.values()), longest_s)
                self.is_idle = pause_s == longest_s
                yield 0, FrameRun.of(Frame({}, 0, is_void=True))
                interrupts.pause(pause_s)
        finally:
            for source in growing.values():
                source.close()

    @property
    def is_ready(self) -> bool:
        """Return whether frames can be read ahead: void frames report every pause."""
        return all(source.is_ready for source in self.sources)

    @property
    def verified(self) -> bool:
        """Return whether every source was read to its end, with checksums that all match."""
        return len(self._verified) == len(self.sources) > 0 and all(self._verified)

    @property
    def unverified(self) -> str | None:
        """Return why the input is not verified; None if it is."""
        return None if self.verified else unverified_text(self.checksums)

    def notes(self) -> list[str]:
        """Return hints for the user, a sentence each: what of the sources is not read."""
        unread = f"columns that were not read: {listed(self._unread)}" if self._unread else None
        doubts = [
            f"frames of more than {MANY_ROWS:,} rows have no step, and column '{name}' is not read: if it is the step, "
            f"give --column step={name}"
            for name in self._maybe_step
        ]
        return [note for note in [unread, *doubts] if note is not None]

    def fraction(self) -> float | None:
        """Return the share of the input read so far, if known."""
        if self.options.merge is not None:
            shares = [source.fraction() for source in self.sources]
            return None if None in shares else sum(s or 0.0 for s in shares) / len(shares)
        share = self.sources[self._reading].fraction()
        return None if share is None else (self._reading + share) / len(self.sources)

    def _doubt(self, columns: BatchPieces, num_rows: int) -> None:
        """Remember the columns that may be the step that a large frame, a batch of so many rows, does not have."""
        if columns.batches_are_frames and num_rows > MANY_ROWS:
            self._maybe_step.update(dict.fromkeys(columns.maybe_step))

    def _runs(self, number: int, source: Source) -> Runs:
        """Return the runs of a source, each until it is handled."""
        self._reading = number
        # With rows to drop, the first of each kind would be one of a later batch.
        joins = source.is_ready and self.options.on_bad_row == "error" and self._merge is None
        with closing(self._decoded(number, source)) as runs:
            for run in joined(runs) if joins else runs:
                yield from run.handled()

    def _decoded(self, number: int, source: Source) -> Runs:
        if isinstance(source, SeekableSource):
            runs = source.frames(self.options, self.first_bad)
            if runs is not None:
                self.checksums.add(False)
                self._verified.append(False)
                yield from runs
                return
        num_unchecked = self.unchecked[number] if number < len(self.unchecked) else 0
        builder = FrameBuilder(self.options, self.first_bad, num_unchecked)
        verified: list[bool] = []
        with closing(source.parts()) as parts:
            for part in parts:
                columns = BatchPieces(part, self.options)
                part.verifies = self.options.verifies and not self.options.ids_only
                part.plain = columns.plain
                self._unread.update(dict.fromkeys(columns.unread))
                if columns.needs_table:
                    self.without_table[part.name] = None
                with closing(part.batches(columns.names)) as batches:
                    for batch in batches:
                        interrupts.check()
                        self.checksums.add(part.has_checksums)
                        is_whole = batch.ends_frame or columns.batches_are_frames
                        if batch.num_rows:
                            self._doubt(columns, batch.num_rows)
                            for piece in columns.pieces(batch):
                                yield from builder.add(piece, is_whole)
                        if is_whole:
                            yield from builder.end()
                self.checksums.add(part.has_checksums)
                verified.append(part.verified)
        self._verified.append(bool(verified) and all(verified))
        yield from builder.end()


def joined(runs: Runs) -> Runs:
    """Join the runs of several small batches. An error is raised after the frames before it."""
    waiting: list[FrameRun] = []
    num_rows, error = 0, None
    while error is None:
        try:
            run = next(runs, None)
        except Exception as raised:
            run, error = None, raised
        if waiting and (run is None or not waiting[0].may_join(run)):
            yield FrameRun.joined(waiting)
            waiting, num_rows = [], 0
        if run is not None:
            waiting.append(run)
            num_rows += int(run.bounds[-1])
            if run.blocks is None or num_rows >= MAX_ROWS_AHEAD:
                yield FrameRun.joined(waiting)
                waiting, num_rows = [], 0
        elif error is None:
            return
    raise error


def in_order(
    sources: Sequence[Generator[Item, None, None]], merge: str | None, first: int = 0
) -> Generator[tuple[int, Item], None, None]:
    """Yield the frames of several sources in the order that ``merge`` selects, each with the number of its source.

    merge : "step": by step, then by source, each sorted by step; "round": the next frame of every source in turn,
        without those that have ended; None: one source after the other
    first : with "round", the source whose turn it is
    """
    with ExitStack() as stack:
        for frames in sources:
            stack.enter_context(closing(frames))
        numbered = [zip(repeat(number), frames, strict=False) for number, frames in enumerate(sources)]
        if merge == "step":
            yield from heapq.merge(*numbered, key=lambda item: (item[1].local_step, item[0]))
        elif merge == "round":
            numbered = numbered[first:] + numbered[:first]
            while numbered:
                for frames_left in list(numbered):
                    frame = next(frames_left, None)
                    if frame is None:
                        numbered.remove(frames_left)
                    else:
                        yield frame
        else:
            yield from chain.from_iterable(numbered)


def _nothing() -> Runs:
    yield from ()


def _alone(runs: Runs) -> Runs:
    """Yield runs of one frame each."""
    with closing(runs):
        for run in runs:
            yield run if len(run) == 1 else FrameRun.of(run.frame())


def _sorted(runs: Runs) -> Runs:
    with closing(runs), closing(sorted_by_step(run.frame() for run in runs)) as frames:
        yield from map(FrameRun.of, frames)


def sorted_by_step(frames: Frames) -> Frames:
    """Yield the same frames. Raises InputError at a frame without a step, or with an earlier one than the last."""
    last: int | None = None
    with closing(frames):
        for frame in frames:
            if frame.is_void:
                frame.local_step = INT64_MIN if last is None else last
            if frame.local_step is None:
                raise InputError("--merge step needs a step column in every source", source=frame.source)
            if last is not None and frame.local_step < last:
                raise InputError(
                    f"--merge step needs sources sorted by step: {frame.local_step} comes after {last}",
                    source=frame.source,
                )
            last = frame.local_step
            yield frame


def unverified_text(checksums: Collection[bool]) -> str:
    """Return why input that has such checksums is not verified: whether each of its sources has any, as far as read."""
    if False not in checksums:
        return "it was not read to its end"
    return "not all of it carries checksums" if True in checksums else "it carries no checksums"
