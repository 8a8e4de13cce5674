"""Readers of a job: each reads some of the sources, and partitions the rows of every frame by share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from penstock.base.errors import UsageError
from penstock.checkpoint.source_positions import Positions
from penstock.contrib.shares import Router
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.seekable_source import SeekableSource
from penstock.model.command_options import JobOptions
from penstock.model.frames import Frame, FrameRun
from penstock.model.overflows import without_overflows

# The place of a frame in the order of a job: its round, then the number of its source.
Place = tuple[int, int]


@dataclass
class ReadFrame:
    """What the driver keeps of a frame. digest : of its source so far; bad_rows : for the quarantine"""

    place: Place
    num_rows: int
    digest: str | None
    bad_rows: tuple[Any, ...] = ()


@dataclass
class ReaderPart:
    """One reader's part of a block, as reported to the driver.

    frames : in the order of their places; num_bytes : of the rows that are sent
    read_s : seconds of reading and routing
    is_over : the reader's sources have ended; error, error_place : raised instead of a frame, and where
    verified, fractions : by source; checksums, first_bad : as in FrameReader; notes : of its readers, each once
    """

    frames: list[ReadFrame] = field(default_factory=list)
    num_bytes: int = 0
    read_s: float = 0.0
    is_over: bool = False
    error: BaseException | None = None
    error_place: Place | None = None
    verified: dict[int, bool] = field(default_factory=dict)
    fractions: dict[int, float | None] = field(default_factory=dict)
    checksums: set[bool] = field(default_factory=set)
    first_bad: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)


class JobReader:
    """Reads sources ``rank``, ``rank + count``, … of the readers of a job.

    read : the options of all of them; seed, sums : of ``Router``
    """

    def __init__(self, options: JobOptions, rank: int, read: ReadOptions, seed: int, sums: bool) -> None:
        self._own = dict(list(enumerate(options.sources))[rank :: options.readers])
        # A share could not say where a bad row came from: frames are validated before they are routed.
        self._options = replace(read, merge=None, unvalidated=False)
        self._alone = sums  # every frame opens the gate
        self._router = Router(options.config, options.shares, seed, sums=sums)

    def begin(self, positions: Mapping[str, Any] | None) -> dict[int, tuple[str, int]]:
        """Begin at some positions, the state of ``Positions``; None: at the start.

        Returns the name of each source, and how many rows of it were skipped. Raises an error if a source cannot be
        read, or is not the one that the positions are of.
        """
        self._readers = {n: FrameReader(_single(source), self._options) for n, source in self._own.items()}
        for reader in self._readers.values():
            if isinstance(reader.sources[0], SeekableSource):
                raise UsageError(
                    f"{reader.sources[0].name}: expected a file, a directory or a stream; a topic or a table with "
                    "versions is read by one process, outside of a job"
                )
        self._frames = {n: iter(reader) for n, reader in self._readers.items()}
        self._at = {n: Positions([self._readers[n].sources[0].name]) for n in self._own}
        if positions is not None:
            saved = Positions.from_state({**positions, "merge": None})
            for number, place in self._at.items():
                before = saved.of_source(number)
                self._readers[number].unchecked = place.unchecked = before.unchecked
                before.skip(zip(repeat(0), self._frames[number], strict=False), place)
                self._readers[number].first_bad.clear()  # an earlier run reported the bad rows of skipped frames
        return {n: (reader.sources[0].name, self._at[n].rows) for n, reader in self._readers.items()}

    def block(self, stop: int) -> tuple[Any, ...]:
        """Read the rounds up to ``stop``. Return the ReaderPart, the heads with their places, and a batch per share."""
        part, frames, began_s = ReaderPart(), [], time.perf_counter()
        for place, frame in self._rounds(stop, part):
            entry = self._at[place[1]].entries[0]
            part.frames.append(ReadFrame(place, frame.num_rows, entry.digest, frame.bad_rows))
            frames.append((place, frame))
        part.is_over = not self._frames
        for number, reader in self._readers.items():
            part.verified[number], part.fractions[number] = reader.verified, reader.fraction()
            part.checksums |= reader.checksums
            part.first_bad.update(reader.first_bad)
            part.notes.update(dict.fromkeys(reader.notes()))
            reader.first_bad.clear()
        heads, batches = self._router.block([frame for _, frame in frames])
        part.num_bytes, part.read_s = sum(batch.nbytes for batch in batches), time.perf_counter() - began_s
        placed = [(place, head) for (place, _), head in zip(frames, heads, strict=True)]
        return part, placed, *batches

    def _rounds(self, stop: int, part: ReaderPart) -> Iterator[tuple[Place, Frame]]:
        """Yield the next frame of every source in turn, without those that have ended."""
        first = min((self._at[n].num_frames for n in self._frames), default=stop)
        for number_of_round in range(first, stop):
            for source in list(self._frames):
                if self._at[source].num_frames > number_of_round:
                    continue
                place = number_of_round, source
                try:
                    frame = next(self._frames[source], None)
                    if frame is not None:
                        frame = without_overflows(frame.audited()) if self._alone else frame.audited()
                except Exception as error:  # whatever it is, it is raised in its turn by the job
                    part.error, part.error_place = error, place
                    self._frames.clear()
                    return
                if frame is None:
                    del self._frames[source]
                    continue
                self._at[source].count(0, FrameRun.of(frame), 0, 1)
                yield place, frame


def _single(source: Any) -> Any:
    """Return a source that a FrameReader takes. A function returns one that cannot be pickled itself."""
    if callable(getattr(source, "iter_batches", None)) and callable(
        getattr(source, "map_batches", None)
    ):  # of Ray Data
        return (
            batch
            for table in source.iter_batches(batch_format="pyarrow", batch_size=None)
            for batch in table.to_batches()
        )
    return source() if callable(source) else source
