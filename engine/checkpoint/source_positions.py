"""Positions in the sources of a run, and the search for them when a run resumes.

A position is a number of frames and a running digest over all of them. A resumed run reads and validates these
frames again, without applying them, and compares the digest: it skips frames that were applied, and rejects another
source, or the same one read with other flags.

Producers that push frames over a network have names and number their frames: the position of a producer is the number
of its last applied frame, with the counts of its last stream.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from penstock.base.errors import StaleInputError, StateError, UsageError
from penstock.io.decoding.reader import FrameReader
from penstock.io.sources.seekable_source import SeekableSource
from penstock.model.frames import Frame, FrameRun, Position, fingerprint
from penstock.model.stats import too_stale
from penstock.model.version import Lineage, Version


@dataclass
class SourcePosition:
    """The position in one source. digest : of all frames so far; None: not computed

    position : of a source that can seek, where it continues; None: it cannot, and a resumed run reads it from the start
    """

    source: str
    frames: int = 0
    digest: str | None = ""
    position: Position | None = None


class Tally(NamedTuple):
    """The counts of one producer's stream.

    process : identifies the producer's process, which may continue over another connection; None: it gave none
    applied, stale : frames; dropped : reason → rows
    """

    process: str | None = None
    applied: int = 0
    stale: int = 0
    dropped: Mapping[str, int] = {}

    def plus(self, frame: Frame, was_stale: bool) -> Tally:
        """Return the counts with one more frame."""
        dropped = self.dropped
        if frame.dropped:
            dropped = dict(Counter(dropped) + Counter(frame.dropped))
        return Tally(self.process, self.applied + (not was_stale), self.stale + was_stale, dropped)


class Claim(NamedTuple):
    """number : larger than those of the name's earlier claims; process : identifies the claiming one"""

    number: int
    process: str


class Positions:
    """One position per source, in the order of the sources.

    hashing : whether to compute digests; costs a pass over the ids

    rows : read from these sources by this run; stale_rows : rows in stale frames
    producers : name → frames applied; tallies : name → counts of its last stream
    claims : name of a producer → the last claim of the name, without its process once that has finished
    creations : name of a source or producer → what tells it from one of its name that is created later
    lineage : the history of steps; None: no service has used it
    unchecked : of every source, how many frames were applied before the tables changed; none of them is compared
    uncounted : the error that kept a frame from being counted after it was applied; None: every one is counted
    """

    def __init__(self, sources: Sequence[str] = (), merge: str | None = None, hashing: bool = True) -> None:
        self._merge, self._hashing = merge, hashing
        self.producers: dict[str, int] = {}
        self.tallies: dict[str, Tally] = {}
        self.claims: dict[str, Claim] = {}
        self.creations: dict[str, str] = {}
        self.lineage: Lineage | None = None
        self.unchecked: list[int] = []
        self.uncounted: str | None = None
        self.rows = self.stale_rows = 0
        self.entries = [SourcePosition(source, 0, "" if hashing else None) for source in sources]

    @property
    def num_frames(self) -> int:
        return sum(entry.frames for entry in self.entries)

    @property
    def num_to_read(self) -> int:
        """Return how many of the frames a resumed run reads again."""
        return sum(entry.frames for entry in self.entries if entry.position is None)

    def count(
        self, number: int, run: FrameRun, first: int, stop: int, is_stale: bool = False, creation: str | None = None
    ) -> None:
        """Count frames of source ``number``, by their numbers in a run. creation : of the source"""
        num_rows, entry = int(run.bounds[stop] - run.bounds[first]), self.entries[number]
        self.rows += num_rows
        self.stale_rows += num_rows * is_stale
        if entry.position is not None:
            position = run.positions[stop - 1] if run.positions else run.frame_at(stop - 1).position
            self._continue_at(entry, position, creation)
        if not self._hashing or entry.digest is None:
            entry.frames += stop - first
            return
        for frame in map(run.frame_at, range(first, stop)):
            entry.frames += 1
            if entry.frames > self._num_unchecked(number):
                entry.digest = _digest_with(entry.digest, frame)

    def _continue_at(self, entry: SourcePosition, position: Position, creation: str | None) -> None:
        entry.position = position
        if len(position) == 1:  # a partition of a broker, which a service may read too
            self.producers[entry.source] = position[0]
        if creation is not None:
            self.creations[entry.source] = creation

    def _num_unchecked(self, number: int) -> int:
        return self.unchecked[number] if number < len(self.unchecked) else 0

    def forget_tables(self) -> None:
        """Compare no frame so far when it is read again: it may have rows of tables that are gone, or of other dims."""
        self.unchecked = [entry.frames for entry in self.entries]
        for entry in self.entries:
            entry.digest = None if entry.digest is None else ""

    def check_counted(self) -> None:
        """Raise StateError if a frame was applied that no position counts: a resumed run would apply it again."""
        if self.uncounted is not None:
            raise StateError(
                f"the last frame was applied, but not counted ({self.uncounted}), so that a resumed run would apply it "
                "again; restore the last commit, or make a new engine"
            )

    def check_limit(self, limit: int | None) -> None:
        """Raise UsageError if these are more frames than a limit of all frames."""
        if limit is not None and limit < self.num_frames:
            raise UsageError(
                f"limit: the checkpoint holds {self.num_frames} frames already, which is more than {limit}"
            )

    def check_stale(self, most: float | None) -> None:
        """Raise StaleInputError if stale frames contain more than the share ``most`` of the rows."""
        problem = too_stale(self.stale_rows, self.rows, most)
        if problem is not None:
            raise StaleInputError(problem)

    def get_state(self) -> dict[str, Any]:
        sources = [[e.source, e.frames, e.digest, *([] if e.position is None else [e.position])] for e in self.entries]
        return {
            "merge": self._merge,
            "sources": sources,
            "producers": dict(self.producers),
            "tallies": {name: list(tally) for name, tally in self.tallies.items()},
            "claims": {name: list(claim) for name, claim in self.claims.items()},
            "creations": dict(self.creations),
            **({"lineage": None, "epochs": None} if self.lineage is None else self.lineage.get_state()),
            "stale_rows": self.stale_rows,
            "rows": self.rows,
            "unchecked": self.unchecked,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Positions:
        positions = cls(merge=state["merge"])
        positions.entries = [
            SourcePosition(source, int(frames), digest, *(tuple(map(int, numbers)) for numbers in position))
            for source, frames, digest, *position in state["sources"]
        ]
        positions.creations = dict(state["creations"])
        claims = state.get("claims", {}).items()
        positions.claims = {name: Claim(int(number), process) for name, (number, process) in claims}
        positions.producers = {name: int(frames) for name, frames in state["producers"].items()}
        positions.tallies = {
            name: Tally(process, int(applied), int(stale), {reason: int(rows) for reason, rows in dropped.items()})
            for name, (process, applied, stale, dropped) in state["tallies"].items()
        }
        positions.lineage = Lineage.from_state(state)
        positions.stale_rows = int(state["stale_rows"])
        positions.rows = int(state["rows"])
        positions.unchecked = list(state["unchecked"])
        return positions

    def version(self, step: int) -> Version:
        """Return the version of a step."""
        return Version(str(step)) if self.lineage is None else self.lineage.at(step)

    def of_source(self, number: int) -> Positions:
        """Return the position in one source; at its start, if there are none of it yet."""
        positions = Positions()
        positions.entries = self.entries[number : number + 1]
        positions.unchecked = self.unchecked[number : number + 1]
        return positions

    def follow(self, before: Positions) -> None:
        """Keep the producers, their counts, what they were read from and the lineage of earlier positions."""
        self.producers, self.tallies, self.creations = before.producers, before.tallies, before.creations
        self.claims, self.lineage = before.claims, before.lineage

    def seek(self, reader: FrameReader, read: Positions) -> None:
        """Let the sources that can seek continue at this position, which ``read`` has from then on."""
        reader.unchecked = read.unchecked = self.unchecked
        seekable = [source.name for source in reader.sources if isinstance(source, SeekableSource)]
        sought = {entry.source: entry for entry in self.entries if entry.position is not None}
        for number, source in enumerate(reader.sources):
            if isinstance(source, SeekableSource):
                before = sought.get(source.name, SourcePosition(source.name))
                position = before.position or ()
                if source.name in self.producers:
                    position = (self.producers[source.name],)
                read.entries[number] = SourcePosition(source.name, before.frames, None, position)
                source.seek(position, self.creations.get(source.name))
        if seekable:  # each has had as many turns, but those after the last one that has had the most
            counts = [entry.frames for entry in read.entries]
            last = max(number for number, frames in enumerate(counts) if frames == max(counts))
            reader.first_source = (last + 1) % len(counts)

    def skip(self, frames: Iterator[tuple[int, Frame]], skipped: Positions) -> None:
        """Advance ``frames`` to this position.

        skipped : counts the skipped frames, so that it equals this position afterwards
        Raises StateError if the skipped frames are not those that were applied.
        """
        self.check_counted()
        self._check_sources(skipped)
        skipped.stale_rows = self.stale_rows
        for number, frame in islice(frames, self.num_to_read):
            if number >= len(self.entries) or skipped.entries[number].frames == self.entries[number].frames:
                raise self._too_short(skipped)
            skipped.count(number, FrameRun.of(frame.audited()), 0, 1)
            self._check_digest(self.entries[number], skipped.entries[number])
        if skipped.num_frames < self.num_frames:
            raise self._too_short(skipped)
        skipped.rows = max(skipped.rows, self.rows)

    def check_none_missing(self, num_sources: int) -> None:
        """Raise StateError if these positions are of more sources than there are."""
        if num_sources < len(self.entries):
            missing = self.entries[num_sources]
            raise StateError(
                f"{missing.source}: the checkpoint holds {missing.frames} frames of it, and it is not among the "
                "sources; give all of them, in the same order"
            )

    def _check_sources(self, read: Positions) -> None:
        self.check_none_missing(len(read.entries))
        names = (entry.source for entry in read.entries)
        # Between those of one topic and of the next one there may be new partitions.
        in_order = all(entry.source in names for entry in self.entries if entry.position is not None)
        for saved, current in zip(self.entries, read.entries, strict=False):
            if in_order and None not in (saved.position, current.position):
                continue
            if (saved.position, current.position) != (None, None) and saved.source != current.source:
                raise StateError(
                    f"{current.source}: the checkpoint holds {saved.frames} frames of {saved.source} in its place; "
                    "give the same sources, in the same order"
                )
        if self.num_frames and self._merge != read._merge:
            how = f"with --merge {self._merge}" if self._merge else f"without --merge {read._merge}"
            raise StateError(f"the checkpoint was made {how}; resume it the same way")

    def _check_digest(self, saved: SourcePosition, read: SourcePosition) -> None:
        if read.frames == saved.frames and None not in (saved.digest, read.digest) and read.digest != saved.digest:
            raise StateError(
                f"{read.source}: its first {read.frames} frames are not those that the checkpoint holds (then named "
                f"{saved.source}): another source, or read with other flags (--column, --contribution-rows, …)"
            )

    def _too_short(self, read: Positions) -> StateError:
        saved, short = next((s, r) for s, r in zip(self.entries, read.entries, strict=False) if r.frames < s.frames)
        return StateError(
            f"{short.source}: ends after {short.frames} frames, or another source comes in between; the checkpoint "
            f"holds {saved.frames} of them. Give the sources that it was made from, in the same order"
        )


def _digest_with(before: str, frame: Frame) -> str:
    """Return the digest with one more frame."""
    return hashlib.blake2b(f"{before}\0{fingerprint(frame)}".encode(), digest_size=16).hexdigest()
