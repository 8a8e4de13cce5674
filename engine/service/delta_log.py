"""The last deltas, once for all readers: made as steps happen, told when nothing can take them back, bounded.

With a checkpoint a delta is told when the commit that holds its step is on disk: what a reader has seen, no crash
undoes. Without one they are made per step while somebody follows, and else when somebody asks: nobody pays for deltas
that nobody reads. Readers keep their own place and come for the next delta; who comes too late is told so. No step
waits for a reader.
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

# How soon it is noticed that a reader who waits for the next delta has gone.
LOOK_AGAIN_S = 1.0


class Told(NamedTuple):
    """One delta. step : the one it leads to"""

    step: int
    batches: tuple[pa.RecordBatch, ...]
    num_bytes: int


class DeltaLog:
    """Deltas of an engine from now on.

    per_steps : one delta per so many steps; None: per commit, or without a checkpoint per step while a reader follows
    max_bytes : of all deltas kept
    durable : whether commits say what may be told

    step : what has been told leads to this one; made_bytes : of all deltas so far, kept or not
    Methods are called from any thread; what the intake calls, under the gate's lock.
    """

    def __init__(self, engine: Engine, per_steps: int | None, max_bytes: int, durable: bool) -> None:
        self._engine, self._durable, self.max_bytes = engine, durable, max_bytes
        self._per_steps, self._num_following = per_steps, 0
        self._row_bytes = max((8 + 4 * spec.dim for spec in engine.core.tables.specs.values()), default=0)
        watch = Deltas(engine.core, DeltaOptions(numbered=True, per_steps=per_steps))
        # Without a checkpoint whoever asks has nothing of this state yet: until then nobody watches.
        self._deltas = watch if durable or per_steps is not None else None
        self.schema = watch.schema
        self._changed = threading.Condition()
        self._kept: deque[Told] = deque()
        self._untold: deque[Told] = deque()
        self._promised_step = self._made_step = self.step = self.first_step = engine.global_step
        self.num_bytes = self.made_bytes = 0
        self.is_closed = False

    # ---- what the intake tells

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
        """Nothing is told any more."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    # ---- what readers ask

    def tell_all(self) -> None:
        """Tell what has changed since the last delta, where that is nobody else's to say. Under the gate's lock."""
        if self._deltas is None:
            self._forget()
        elif not self._durable:
            self.commit_begins()
            self.commit_is_on_disk()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Somebody follows."""
        with self._engine.gate.still():
            self.tell_all()
            self._num_following += 1
        try:
            yield
        finally:
            with self._engine.gate.still():
                self._num_following -= 1

    def look_again(self) -> None:
        """A reader who waits may have gone."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        """Until what leads to a step has been told. Raises ServiceError where the service ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self.step >= step or self.is_closed)
            if self.step < step:
                raise ServiceError("the service is ending")

    def after(self, since: int, until: int | None = None, gone: Callable[[], bool] = lambda: False) -> Iterator[Told]:
        """Deltas that lead on from a step, each once, in order.

        until : end with the one that leads there; None: with the service, or when the reader has ``gone``
        Raises DeltasGoneError where one is no longer kept, or the step is none that was told.
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
        """Raise DeltasGoneError where nobody can go on from a step."""
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
        """Steps that changed nothing are told by nothing; a reader may be at one of them all the same."""
        if (num_bytes := deltas.num_touched * self._row_bytes) > self.max_bytes:
            self.made_bytes += num_bytes
            self._forget()
            return
        batches = tuple(make())
        if batches or not deltas.num_touched:
            self._made_step = self._engine.global_step
        if batches:
            # The last step that changed anything, as readers see it: they come back with what they have seen.
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
        """More has changed than may be kept: who wants to go on from before takes the tables anew."""
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
