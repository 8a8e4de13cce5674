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
from typing import TYPE_CHECKING, NamedTuple

from penstock.deltas import DeltaOptions, Deltas
from penstock.errors import DeltasGoneError, ServiceError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.engine import Engine

# How often a waiting reader is checked for having disconnected.
LOOK_AGAIN_S = 1.0


class Told(NamedTuple):
    """One delta. step : the step it leads to"""

    step: int
    batches: tuple[pa.RecordBatch, ...]
    num_bytes: int


class DeltaLog:
    """The deltas of an engine, from its current step.

    per_steps : steps per delta; None: per commit, or without a checkpoint per step while a reader follows
    max_bytes : of all retained deltas
    durable : whether to publish deltas only after their commit

    step : the step that the published deltas lead to
    first_step : the step that the retained deltas begin at
    num_bytes : of the retained deltas; made_bytes : of all deltas so far, retained or not
    Methods may be called from any thread; those that the intake calls, under the gate's lock.
    """

    def __init__(self, engine: Engine, per_steps: int | None, max_bytes: int, durable: bool) -> None:
        self._engine, self._durable, self.max_bytes = engine, durable, max_bytes
        self._per_steps, self._num_following = per_steps, 0
        self._row_bytes = max((8 + 4 * spec.dim for spec in engine.core.tables.specs.values()), default=0)
        watch = Deltas(engine.core, DeltaOptions(numbered=True, per_steps=per_steps))
        # Without a checkpoint, no reader has an earlier state: changes are tracked from the first request.
        self._deltas = watch if durable or per_steps is not None else None
        self.schema = watch.schema
        self._changed = threading.Condition()
        self._kept: deque[Told] = deque()
        self._untold: deque[Told] = deque()
        self._promised_step = self._made_step = self.step = self.first_step = engine.global_step
        self.num_bytes = self.made_bytes = 0
        self.is_closed = False

    # ---- called by the intake

    def stepped(self) -> None:
        if self._deltas is None or (self._per_steps is None and (self._durable or not self._num_following)):
            return
        self._keep(self._deltas, self._deltas.due)
        if not self._durable:
            self._tell_to(self._made_step)

    def commit_begins(self) -> None:
        if self._deltas is not None:
            self._keep(self._deltas, self._deltas.take)
        self._promised_step = self._made_step

    def commit_is_on_disk(self) -> None:
        self._tell_to(self._promised_step)

    def close(self) -> None:
        """Stop publishing, and wake all waiting readers."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    # ---- called for readers

    def tell_all(self) -> None:
        """Publish all changes since the last delta, unless a commit has to come first. Under the gate's lock."""
        if self._deltas is None:
            self._forget()
        elif not self._durable:
            self.commit_begins()
            self.commit_is_on_disk()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Count a reader as following during the block."""
        with self._engine.gate.still():
            self.tell_all()
            self._num_following += 1
        try:
            yield
        finally:
            with self._engine.gate.still():
                self._num_following -= 1

    def look_again(self) -> None:
        """Wake the waiting readers: one of them may have disconnected."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Wait until the deltas up to a step are published. Raises ServiceError if the service ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self.step >= step or self.is_closed)
            if self.step < step:
                raise ServiceError("the service is ending")

    def after(self, since: int, until: int | None = None, gone: Callable[[], bool] = lambda: False) -> Iterator[Told]:
        """Yield the published deltas after a step, in order, and wait for further ones.

        until : the step to end at; None: end with the service, or when ``gone`` returns True
        Raises DeltasGoneError if a delta is no longer retained, or ``since`` is ahead of the service.
        """
        while until is None or since < until:
            with self._changed:
                told = self._next(since)
                if told is None:
                    if self.is_closed or gone() or (until is not None and self.step >= until):
                        return
                    self._changed.wait(LOOK_AGAIN_S)
                    continue
            if until is not None and told.step > until:
                return
            yield told
            since = told.step

    def check(self, since: int) -> None:
        """Raise DeltasGoneError if a reader cannot continue from a step."""
        with self._changed:
            self._next(since)

    def _next(self, since: int) -> Told | None:
        if since > max(self.step, self.first_step):
            raise DeltasGoneError(f"step {since} is ahead of this service, which is at step {self.step}; {_ANEW}")
        if since < self.first_step:
            raise DeltasGoneError(f"deltas are kept from step {self.first_step} on, not from {since}; {_ANEW}")
        return next((told for told in self._kept if told.step > since), None)

    # ---- inside

    def _keep(self, deltas: Deltas, make: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        """Retain the delta that ``make`` creates; drop all if it is too large. A step without changes has no delta."""
        if (num_bytes := deltas.num_touched * self._row_bytes) > self.max_bytes:
            self.made_bytes += num_bytes
            self._forget()
            return
        batches = tuple(make())
        if batches or not deltas.num_touched:
            self._made_step = self._engine.global_step
        if batches:
            # The last step that changed anything: readers send it back as their position.
            step = batches[0].column("step")[0].as_py()
            num_bytes = sum(batch.get_total_buffer_size() for batch in batches)
            with self._changed:
                self._untold.append(Told(step, batches, num_bytes))
                self.num_bytes += num_bytes
                self.made_bytes += num_bytes
                self._make_room()

    def _tell_to(self, step: int) -> None:
        with self._changed:
            while self._untold and self._untold[0].step <= step:
                self._kept.append(self._untold.popleft())
            self.step = step
            self._changed.notify_all()

    def _forget(self) -> None:
        """Drop all deltas, and track changes from the current step: earlier readers must read the tables again."""
        self._deltas = Deltas(self._engine.core, DeltaOptions(numbered=True, per_steps=self._per_steps))
        with self._changed:
            self._kept.clear()
            self._untold.clear()
            self.num_bytes = 0
            self.first_step = self._made_step = self._engine.global_step
            if not self._durable:
                self.step = self.first_step

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes:
            gone = (self._kept or self._untold).popleft()
            self.num_bytes -= gone.num_bytes
            self.first_step = gone.step


_ANEW = "take the tables anew, and go on from their step"
