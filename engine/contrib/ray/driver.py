"""The driver of a job: from a commit to the end of the sources, or to a failure.

Readers run some blocks ahead of the owners. A commit follows a block, when every owner has applied it: then all owners
are at one place of the order, and the driver has written the deltas and bad rows up to it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import penstock.base.interrupts as interrupts
from penstock.base.errors import CapacityError, StateError
from penstock.checkpoint.parts import join_parts
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder
from penstock.contrib.ray.cluster import Actors, LostError
from penstock.contrib.ray.owners import Applied, Begun, Ended
from penstock.contrib.ray.readers import Place, ReaderPart, ReadFrame
from penstock.contrib.shares.joined_deltas import JoinedDeltas
from penstock.contrib.shares.joined_reports import joined_counters
from penstock.core.telemetry import MetricsSnapshot
from penstock.io.run_files import RunFiles
from penstock.model.command_options import JobOptions
from penstock.model.stats import Counters

if TYPE_CHECKING:
    from penstock.contrib.ray.job_metrics import JobMetrics

# Blocks that readers are asked for before owners have applied the one before.
AHEAD = 2
# Blocks that every owner may have waiting: they bound the memory of the object store.
IN_FLIGHT = 2
# The bytes that a block should have per owner, and the most rounds: each block costs Ray a task per reader and owner.
BLOCK_BYTES, MOST_ROUNDS, GROWTH = 16 << 20, 256, 4


@dataclass
class JobBlock:
    """One block on its way. stop : the place where it ends early, if it does

    refs : of what owners report; snapshots : of their snapshots after it, if these are due
    """

    parts: list[ReaderPart]
    frames: list[ReadFrame]
    stop: Place | None
    error: BaseException | None
    is_last: bool
    refs: list[Any] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)


class Driver:
    """One attempt of a job.

    actors : readers and owners, whatever state they have
    commit : to begin with, the newest of ``folder``; None: begin at the start, with the tables of ``init``
    options : of the job
    metrics : of the job; None: none are wanted

    positions : in the sources; notes : of the readers, each once
    counters : of this attempt; committed : those of them at its last commit; has_committed : whether it has committed
    """

    def __init__(
        self,
        actors: Actors,
        folder: Folder | None,
        commit: Commit | None,
        options: JobOptions,
        progress: Callable[[Counters, int], None] | None,
        metrics: JobMetrics | None,
    ) -> None:
        self._actors, self._folder, self._commit = actors, folder, commit
        self._options, self._progress, self._metrics = options, progress, metrics
        self._read_s = 0.0
        self._fractions: dict[int, float | None] = dict.fromkeys(range(len(options.sources)), 0.0)
        self.counters, self.first_bad, self.notes = Counters(), dict[str, str](), dict[str, None]()
        self.committed, self.has_committed = Counters(), False
        self.verified, self.checksums = dict[int, bool](), set[bool]()
        self.num_accumulated = 0
        self.error: BaseException | None = None
        self._attempt = secrets.token_hex(4)
        address = None if folder is None or commit is None else folder.files.address
        begun: list[Begun] = actors.begin(lambda: [owner.begin.remote(address) for owner in actors.owners])
        self.global_step, self.changed_step = begun[0].global_step, max(owner.changed_step for owner in begun)
        self._step, self._frames_before = self.global_step, begun[0].num_frames
        saved = begun[0].positions
        if saved is not None:
            before = Positions.from_state(saved)
            if saved["merge"] != "round" and len(before.entries) > 1 and before.num_frames:
                problem = "the checkpoint was made without --merge round, which is the order of a job; resume it so"
                raise StateError(problem)
        read: dict[int, tuple[str, int]] = {}
        for sources in actors.begin(lambda: [reader.begin.remote(saved) for reader in actors.readers]):
            read |= sources
        self.positions = Positions([read[n][0] for n in range(len(options.sources))], "round")
        self.positions.rows = sum(rows for _, rows in read.values())
        if saved is not None:
            before.check_none_missing(len(options.sources))
            self.positions.stale_rows, self.positions.unchecked = before.stale_rows, before.unchecked
            for entry, old in zip(self.positions.entries, before.entries, strict=False):
                entry.frames, entry.digest = old.frames, old.digest
        self.num_skipped = self.positions.num_frames
        self.positions.check_limit(options.limit)
        self._stale_before = self.positions.stale_rows

    def run(self, files: RunFiles, deltas: JoinedDeltas | None) -> list[Ended]:
        """Apply the sources to their end, and commit. Raises an error that ended them, after the commit before it.

        files : of bad rows and of deltas, open
        """
        self._files, self._deltas = files, deltas
        in_flight: deque[JobBlock] = deque()
        interrupt: KeyboardInterrupt | None = None
        try:
            for block in self._read():
                in_flight.append(block)
                self._finish(in_flight, IN_FLIGHT)
                if self._is_due() or block.is_last:
                    self._finish(in_flight, 0)
                    if self._is_due() and not block.is_last and self.error is None:
                        self.commit()
                if self.error is not None:
                    break
                interrupts.check()
        except KeyboardInterrupt as signal:
            interrupt, self._actors.interruptible = signal, False
            self._finish(in_flight, 0)
        if not isinstance(self.error, CapacityError | MemoryError):  # else the owners may be at different steps
            self.commit()
        self._measure(self._snapshots())
        if (error := interrupt or self.error) is not None:
            raise error
        return self._actors.begin(lambda: [owner.end.remote() for owner in self._actors.owners])

    def commit(self) -> None:
        """Commit the state after the last block."""
        if self._folder is None:
            return
        number = self._folder.next_number()
        place, attempt = self._folder.files.address, self._attempt
        writes = [owner.write_part.remote(place, number, attempt) for owner in self._actors.owners]
        parts: list[Commit] = self._actors.get(writes)
        if any(part.contents["counters"]["frames"] != self._frames_before + self.counters.frames for part in parts):
            raise StateError("an interrupt came between two frames of a block; the last commit counts")
        contents = {"positions": self.positions.get_state(), **self._files.commit()}
        self._commit = join_parts(self._folder, number, parts, contents, self._options.keep)
        self._step, self.committed, self.has_committed = self.global_step, self.counters, True

    # ---- blocks

    def _read(self) -> Any:
        """Yield blocks that owners have been asked to apply."""
        actors, shares = self._actors, len(self._actors.owners)
        limit, rounds = self._options.limit, self._options.rounds_per_block or 1
        stop = max((entry.frames for entry in self.positions.entries), default=0)
        left = None if limit is None else limit - self.num_skipped
        ahead = deque[tuple[int, list[Any]]]()
        while True:
            while len(ahead) < AHEAD:
                stop += rounds
                ahead.append((rounds, [r.block.options(num_returns=2 + shares).remote(stop) for r in actors.readers]))
            asked, refs = ahead.popleft()
            parts: list[ReaderPart] = actors.get([ref[0] for ref in refs])
            if self._options.rounds_per_block is None:
                num_bytes = max(1, sum(part.num_bytes for part in parts))
                rounds = max(1, min(asked * shares * BLOCK_BYTES // num_bytes, asked * GROWTH, MOST_ROUNDS))
            block = self._block(parts, left)
            left = None if left is None else left - len(block.frames)
            flush = self._options.flush and block.is_last and block.error is None
            heads = [ref[1] for ref in refs]
            block.refs = [
                owner.apply.remote(block.stop, flush, *heads, *(ref[2 + rank] for ref in refs))
                for rank, owner in enumerate(actors.owners)
            ]
            if self._metrics is not None and self._metrics.is_due():
                block.snapshots = self._snapshots()
            yield block
            if block.is_last:
                return

    def _block(self, parts: list[ReaderPart], left: int | None) -> JobBlock:
        """Return a block, which ends early at the first error or at the limit."""
        frames = sorted((frame for part in parts for frame in part.frames), key=lambda frame: frame.place)
        stops = [(part.error_place, part.error) for part in parts if part.error_place is not None]
        if left is not None and len(frames) >= left:
            beyond = frames[left].place if len(frames) > left else None
            stops.append((beyond or (1 << 62, 0), None))
        stop, error = min(stops, key=lambda early_end: early_end[0]) if stops else (None, None)
        if stop is not None:
            frames = [frame for frame in frames if frame.place < stop]
        is_last = stop is not None or all(part.is_over for part in parts)
        return JobBlock(parts, frames, stop, error, is_last)

    def _finish(self, in_flight: deque[JobBlock], most: int) -> None:
        """Wait until owners have applied all blocks but so many, and count them. Nothing counts after an error."""
        while len(in_flight) > most:
            if self.error is None:
                self._count(in_flight[0])
            in_flight.popleft()

    def _count(self, block: JobBlock) -> None:
        applied: list[Applied] = self._actors.get(block.refs)
        first = applied[0]
        self.error = next((result.error for result in applied if result.error is not None), block.error)
        if len({(result.num_frames, result.global_step, result.num_accumulated) for result in applied}) > 1:
            self.error = self.error or StateError("the shares of the job have diverged")
        for frame in block.frames[: first.num_frames]:
            entry = self.positions.entries[frame.place[1]]
            entry.frames, entry.digest = entry.frames + 1, frame.digest
            self.positions.rows += frame.num_rows
            if self._files.bad_rows is not None:
                self._files.bad_rows.append(frame.bad_rows)
        self.counters = joined_counters([Counters.from_state(result.counters) for result in applied])
        self.positions.stale_rows = self._stale_before + self.counters.stale_rows
        self.global_step, self.num_accumulated = first.global_step, first.num_accumulated
        for part in block.parts:
            self.verified |= part.verified
            self.checksums |= part.checksums
            self.first_bad = {**part.first_bad, **self.first_bad}
            self.notes |= part.notes
            self._read_s += part.read_s
            self._fractions |= part.fractions
        self._measure(block.snapshots)
        if self._deltas is not None and self._files.deltas is not None:
            for batch in self._deltas.join([result.deltas for result in applied]):
                self._files.deltas.write(batch)
        if self._progress is not None:
            self._progress(self.counters, self.global_step)

    def _is_due(self) -> bool:
        every = self._options.every
        return every is not None and self.global_step - self._step >= every

    # ---- metrics

    def _snapshots(self) -> list[Any]:
        return [] if self._metrics is None else [owner.snapshot.remote() for owner in self._actors.owners]

    def _measure(self, refs: list[Any]) -> None:
        """Update the metrics of the job by snapshots of all owners, if there are any."""
        if self._metrics is None or not refs:
            return
        commit = None
        if self._folder is not None and self._commit is not None:
            commit = self._commit, self._folder.written_s(self._commit)
        with suppress(LostError):  # which ends an attempt where its results are awaited
            owners: list[MetricsSnapshot] = self._actors.get(refs)
            self._metrics.update(owners, self._read_s, list(self._fractions.values()), self.first_bad, commit)
