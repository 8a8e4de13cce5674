"""A bounded log of the last deltas, shared by all readers.

With a checkpoint, a delta is published once the commit that contains its step is durable, so a crash never undoes
deltas that a reader has seen. Without one, deltas are created per step while a reader follows, and otherwise on
request, so unread deltas cost nothing. Each reader keeps its position and pulls the next delta; a reader that is too
slow gets DeltasGoneError. No step waits for a reader.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from penstock.api.deltas import Deltas
from penstock.api.engine import Engine
from penstock.base.errors import DeltasGoneError, ServiceError
from penstock.base.validation import INT64_MAX
from penstock.core.freshness import DELTA, ROW
from penstock.model.options import DeltaOptions
from penstock.model.version import ANEW

# How often a waiting reader is checked for having disconnected.
CHECK_S = 1.0


class LoggedDelta(NamedTuple):
    """step : the step that it leads to"""

    step: int
    batches: tuple[pa.RecordBatch, ...]
    num_bytes: int


class DeltaLog:
    """The deltas of an engine, from its current step.

    per_steps : steps per delta; None: per commit, or without a checkpoint per step while a reader follows
    max_bytes : of all retained deltas
    durable : whether to publish deltas only after their commit
    last : whether deltas say when each key of a dynamic table occurred last

    step : the step that the published deltas lead to
    first_step : the step that the retained deltas begin at
    num_bytes : of the retained deltas; created_bytes : of all deltas so far, retained or not
    Methods may be called from any thread; those that the sequencer calls, under the gate's lock.
    """

    def __init__(self, engine: Engine, per_steps: int | None, max_bytes: int, durable: bool, last: bool) -> None:
        self._engine, self._durable, self.max_bytes, self.last = engine, durable, max_bytes, last
        self._freshness = engine.core.freshness
        self._per_steps, self._num_following = per_steps, 0
        self._row_bytes = max((8 + 4 * spec.dim for spec in engine.core.tables.specs.values()), default=0)
        deltas = self._tracked()
        # Without a checkpoint, no reader has an earlier state: changes are tracked from the first request.
        self._deltas = deltas if durable or per_steps is not None else None
        self.form = deltas.form
        self._changed = threading.Condition()
        self._retained: deque[LoggedDelta] = deque()  # those up to ``step`` are published
        self.step = self.first_step = engine.global_step
        self._logged_step = self._committing_step = self.step  # of all deltas, and of those in the commit in flight
        self.num_bytes = self.created_bytes = 0
        self.is_closed = False

    # ---- called by the sequencer

    def stepped(self) -> None:
        if self._deltas is None or (self._per_steps is None and (self._durable or not self._num_following)):
            return
        self._log(self._deltas, self._deltas.due if self._per_steps is not None else self._deltas.take)
        if not self._durable:
            if self._logged_step == self._engine.global_step:
                self._freshness.begins(DELTA)
            self._publish(self._logged_step)

    def end_delta(self) -> None:
        """Let what changed so far be a delta; it is published after its commit."""
        if self._deltas is not None:
            self._log(self._deltas, self._deltas.take)

    def commit_begins(self) -> None:
        self.end_delta()
        self._committing_step = self._logged_step
        self._freshness.begins(DELTA)

    def commit_is_on_disk(self) -> None:
        self._publish(self._committing_step)

    def close(self) -> None:
        """Stop publishing, and wake all waiting readers."""
        self.is_closed = True
        self.wake_readers()

    # ---- called for readers

    @property
    def frame_times(self) -> dict[str, int]:
        """Return the largest time of the frames in rows, deltas and the last commit, as far as known.

        Without a checkpoint, readers get all rows as deltas when they ask. Call it under the gate's lock.
        """
        newest = self._freshness.newest
        return {**newest, DELTA: newest[ROW]} if not self._durable and ROW in newest else dict(newest)

    def publish_all(self) -> int:
        """Publish all changes since the last delta, unless a commit has to come first.

        Returns the step that the next delta begins at.
        """
        with self._engine.gate.still():
            if self._deltas is None:
                self._restart()
            elif not self._durable:
                self.commit_begins()
                self.commit_is_on_disk()
            # If more changed than is retained, the next deltas begin at ``first_step``.
            return max(self.step, self.first_step)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Count a reader as following during the block."""
        with self._engine.gate.still():
            self.publish_all()
            self._num_following += 1
        try:
            yield
        finally:
            with self._engine.gate.still():
                self._num_following -= 1

    def wake_readers(self) -> None:
        """Wake the waiting readers: one of them may have disconnected."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Wait until the deltas up to a step are published. Raises ServiceError if the service ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self.step >= step or self.is_closed)
            if self.step < step:
                raise ServiceError("the service is ending")

    def after(self, since: int, until: int | None, is_cancelled: Callable[[], bool]) -> Iterator[LoggedDelta]:
        """Yield the published deltas after a step, in order.

        until : a published step to end at; None: wait for later deltas, until the service ends or ``is_cancelled``
        Raises DeltasGoneError if a delta is no longer retained, or ``since`` is ahead of the service.
        """
        while until is None or since < until:
            with self._changed:
                delta = self._next(since)
                if delta is None:
                    if until is not None or self.is_closed or is_cancelled():
                        return
                    self._changed.wait(CHECK_S)
                    continue
            if until is not None and delta.step > until:
                return
            yield delta
            since = delta.step

    def check(self, since: int) -> None:
        """Raise DeltasGoneError if a reader cannot continue from a step."""
        with self._changed:
            self._next(since)

    def _next(self, since: int) -> LoggedDelta | None:
        if since > max(self.step, self.first_step):
            raise DeltasGoneError(f"step {since} is ahead of this service, which is at step {self.step}; {ANEW}")
        if since < self.first_step:
            raise DeltasGoneError(f"deltas are kept from step {self.first_step} on, not from {since}; {ANEW}")
        return next((delta for delta in self._retained if since < delta.step <= self.step), None)

    # ---- inside

    def _tracked(self) -> Deltas:
        """Track the changes from the current step."""
        # None is due at a step of its own, which native code then need not stop at.
        per_steps = INT64_MAX if self._per_steps is None else self._per_steps
        return Deltas(self._engine.core, DeltaOptions(numbered=True, per_steps=per_steps, last=self.last), False)

    def _log(self, deltas: Deltas, create: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        """Retain the delta that ``create`` returns; drop all if it is too large. A step without changes has none."""
        if (num_bytes := deltas.num_touched * self._row_bytes) > self.max_bytes:
            self.created_bytes += num_bytes
            self._restart()
            return
        batches = tuple(create())
        if batches or not deltas.num_touched:
            self._logged_step = self._engine.global_step
        if batches:
            # The last step that changed anything: readers send it back as their position.
            step = batches[0].column("step")[0].as_py()
            num_bytes = sum(batch.get_total_buffer_size() for batch in batches)
            with self._changed:
                self._retained.append(LoggedDelta(step, batches, num_bytes))
                self.num_bytes += num_bytes
                self.created_bytes += num_bytes
                while self.num_bytes > self.max_bytes:
                    dropped = self._retained.popleft()
                    self.num_bytes -= dropped.num_bytes
                    self.first_step = dropped.step

    def _publish(self, step: int) -> None:
        self._freshness.ends(DELTA)
        with self._changed:
            self.step = step
            self._changed.notify_all()

    def _restart(self) -> None:
        """Drop all deltas, and track changes from the current step: earlier readers must read the tables again."""
        self._deltas = self._tracked()
        with self._changed:
            self._retained.clear()
            self.num_bytes = 0
            self.first_step = self._logged_step = self._engine.global_step
            if not self._durable:
                self.step = self.first_step
