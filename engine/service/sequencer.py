"""The sequencer of the service: applies the frames of all producers in one order, counts and acknowledges them.

Frames enter one by one under the gate's lock, so the tables, the positions of the producers and the commits of both
always agree. No code here waits for a producer or a reader: messages to them are passed to streams, which have
dedicated threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.checkpoint.commit_session import CommitListener
from penstock.checkpoint.store import Folder
from penstock.errors import InputError, ServiceError, UsageError
from penstock.frames import Frame
from penstock.io.flight.messages import Ack, PutRequest
from penstock.learning_rates import LearningRates
from penstock.service.streams import Held, Stream
from penstock.stats import Counters

if TYPE_CHECKING:
    from penstock.engine import Engine


class Steps(Protocol):
    """Is notified of steps and commits, under the gate's lock."""

    def commit_begins(self) -> None: ...

    def commit_is_on_disk(self) -> None: ...

    def stepped(self) -> None: ...

    def close(self) -> None: ...


class Intake(CommitListener):
    """The only way for frames into the engine of a service.

    rates : learning rates, which the rates of frames are combined with
    steps : is notified of steps and commits
    max_producers : names whose positions are stored, each from its first frame
    failed : called when the service cannot continue, but not by ``end``

    ended : set when no more frames are taken and every applied frame is durable, or the commit has failed
    error : the error that ended the intake; None if ``end`` did
    """

    def __init__(
        self,
        engine: Engine,
        rates: LearningRates,
        steps: Steps,
        max_producers: int,
        failed: Callable[[], object],
        folder: Folder | None = None,
        every: int | None = None,
        resume: bool = False,
    ) -> None:
        engine.core.check_ready()
        self._engine, self._rates, self._steps, self._max_producers = engine, rates, steps, max_producers
        self._on_failure = failed
        self.counters = Counters()
        self.first_bad: dict[str, str] = {}  # the first row dropped, or frame rejected, for each reason
        self._streams: set[Stream] = set()
        self._newest: dict[str, Stream] = {}  # by contributor
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._closing = False
        self._positions = engine.session.positions
        if not resume or self._positions.lineage is None:
            self._positions.lineage = secrets.token_hex(8)
        self._durable = self._promised = self._now(copied=True)
        self._waiting: list[threading.Event] = []  # for the next commit; ``_served``: for the one in flight
        self._served: list[threading.Event] = []
        engine.core.start_counting()
        engine.core.rates = rates
        engine.session.count_into(self.counters)
        self._commits = None if folder is None else engine.session.commits(folder, every, resume, self)

    @property
    def lineage(self) -> str:
        """Return the identifier of this history of steps. Only a restart from the checkpoint keeps it."""
        assert self._positions.lineage is not None
        return self._positions.lineage

    @property
    def durable_step(self) -> int:
        """Return the global step of the last durable commit."""
        return self._durable.step

    @property
    def is_closing(self) -> bool:
        """Return whether the service is ending, and takes no more frames."""
        return self._closing

    @property
    def is_durable(self) -> bool:
        """Return whether the service has a checkpoint."""
        return self._commits is not None

    def reads_once(self) -> bool:
        """Return whether the values of the next frame are read only once, by the sum.

        If the gate accumulates several frames, values are validated first: an addition to the others cannot be undone.
        """
        gate = self._engine.gate
        return gate.num_required == 1 and not gate.num_accumulated

    # ---- streams

    def open(self, request: PutRequest, tell: Callable[[Ack], None]) -> Stream:
        """Open a stream. An earlier stream of the same contributor ends at its next frame.

        tell : sends an acknowledgement to the producer; must not block
        Raises UsageError or InputError if the stream cannot begin at its first frame, ServiceError if the service ends.
        """
        name = request.contributor
        with self._engine.gate.still():
            self._check_open()
            now = self._now()
            stream = Stream(name, self._first(request), tell, now.tally(name, request.stream))
            # The first acknowledgement tells a producer which frames to resend.
            stream.acked, stream.promised = (
                held.ack(stream, held.tally(name, request.stream), self.is_durable)
                for held in (self._durable if self.is_durable else now, self._promised)
            )
            self._streams.add(stream)
            if name is not None:
                self._newest[name] = stream
            tell(stream.acked)
        return stream

    def take(self, stream: Stream, frame: Frame) -> None:
        """Apply one frame, or skip it if it was applied before.

        Raises InputError for an invalid frame (nothing of it is applied), ServiceError if the service takes no more
        frames, UsageError if another stream of the producer has begun or its position cannot be stored.
        """
        with self._engine.gate.still():
            self._check_open()
            self._check_newest(stream)
            if stream.contributor is not None and stream.next <= self.position(stream.contributor):
                stream.next += 1
                self._tell_if_done(stream)
                return
            if stream.contributor is not None:
                self._check_room(stream.contributor)
            self._apply(stream, _named(frame, stream.contributor))
            self._tell_if_done(stream)

    def refused(self, error: InputError) -> None:
        """Record a rejected frame: the first error for each reason is reported."""
        with self._engine.gate.still():
            self.first_bad.setdefault(error.reason or "refused", str(error))

    def finish(self, stream: Stream) -> bool:
        """Request a commit after a stream's last frame. Return whether there is an acknowledgement to wait for."""
        with self._engine.gate.still():
            return stream.acked.position < stream.position and (self._commits is None or self._commits.ask())

    def close(self, stream: Stream) -> None:
        with self._engine.gate.still():
            self._streams.discard(stream)
            if stream.contributor is not None and self._newest.get(stream.contributor) is stream:
                del self._newest[stream.contributor]

    # ---- positions and commits

    def position(self, contributor: str) -> int:
        """Return the number of a producer's frames that were applied."""
        return self._positions.producers.get(contributor, 0)

    def durable_position(self, contributor: str) -> int:
        """Return the number of a producer's frames that are durable; without a checkpoint, that were applied."""
        return self._durable.positions.get(contributor, 0) if self.is_durable else self.position(contributor)

    @property
    def num_producers(self) -> int:
        return len(self._positions.producers)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def ask_for_commit(self) -> bool:
        """Request a commit. Return False if everything is durable already, or there is no checkpoint."""
        with self._engine.gate.still():
            return self._commits is not None and self._commits.ask()

    def commit(self) -> None:
        """Commit everything that was applied, and wait until it is durable.

        Raises ServiceError if that fails, UsageError without a checkpoint.
        """
        done = threading.Event()
        with self._engine.gate.still():
            self._check_open()
            if self._commits is None:
                raise UsageError("this service has no checkpoint: start it with --checkpoint DIR")
            if not self._commits.ask(again=True):
                return
            self._waiting.append(done)
        done.wait()
        if self.error is not None:
            raise ServiceError(f"the commit failed: {self.error}")

    def commit_begins(self) -> None:
        self._served, self._waiting = self._waiting, []
        self._promised = self._now(copied=True)
        for stream in self._streams:
            stream.promised = self._promised.ack(stream, stream.tally, durable=True)
        self._steps.commit_begins()

    def commit_is_on_disk(self) -> None:
        self._durable = self._promised
        for done in self._served:
            done.set()
        for stream in self._streams:
            self._acknowledge(stream, stream.promised)
        self._steps.commit_is_on_disk()

    def commit_failed(self, error: BaseException) -> None:
        self._fail(error)

    # ---- the end

    def end(self) -> None:
        """Take no more frames, commit what was applied, and notify every stream. Raises the error of the commit."""
        with self._engine.gate.still():
            if self._closing:
                return
            self._closing = True
        try:
            if self._commits is not None:
                self._commits.end()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._say_goodbye()

    def _fail(self, error: BaseException) -> None:
        """Stop taking frames and committing, because of an error."""
        with self._engine.gate.still():
            if self._closing:
                return
            self._closing, self.error = True, error
            if self._commits is not None:
                self._commits.close()
        self._say_goodbye()
        self._on_failure()

    def _say_goodbye(self) -> None:
        with self._engine.gate.still():
            for done in (*self._served, *self._waiting):
                done.set()
            for stream in self._streams:
                stream.tell(replace(stream.acked, closing=True))
        self._steps.close()
        self.ended.set()

    # ---- inside

    def _apply(self, stream: Stream, frame: Frame) -> None:
        """Apply a frame and count it, under the gate's lock. No code that can fail or commit may run between the push
        and the update of the position: a frame that was applied but not counted is applied again when it is resent."""
        step, watch = self._engine.global_step, self._engine.watch
        try:
            with watch.timed("sum"):
                taken, was_admitted = self._engine.core.push(frame, self._rates, self.counters)
        except BaseException as error:
            if self._engine.core.failed is not None:  # else nothing of the frame was applied
                self._fail(error)
            raise
        stream.next += 1
        if stream.contributor is not None:
            self._positions.producers[stream.contributor] = stream.position
        stream.tally = stream.tally.plus(taken, not was_admitted)
        if stream.contributor is not None:
            self._positions.tallies[stream.contributor] = stream.tally
        try:
            if self._engine.global_step != step:
                self._steps.stepped()
            if self._commits is not None:
                with watch.timed("save"):
                    self._commits.frame_counted()
                    if self._commits.is_due:
                        self._commits.ask()
                    self._commits.advance()
        except BaseException as error:
            self._fail(error)
            raise
        watch.sample(frame, self._engine.core.gate, self._engine.core.last_rates or ())

    def _check_open(self) -> None:
        if self.error is not None:
            raise ServiceError(f"the service has failed and ends ({self.error}); send again what was not acknowledged")
        if self._closing:
            raise ServiceError("the service is ending; send again later what was not acknowledged")

    def _check_newest(self, stream: Stream) -> None:
        if stream.contributor is not None and self._newest.get(stream.contributor) is not stream:
            raise UsageError(f"another stream of producer '{stream.contributor}' has begun: this one ends")

    def _first(self, request: PutRequest) -> int:
        """Return the number of a stream's first frame. Raises UsageError or InputError if it cannot begin there."""
        name, first = request.contributor, request.first
        if name is None:
            return 1
        position = self.position(name)
        if first is None and position:
            raise UsageError(
                f"producer '{name}': {position} of its frames are here already: say the number of the stream's first "
                f'frame ("first": {position + 1} goes on)'
            )
        if first is not None and first > position + 1:
            raise InputError(
                f"a gap: frame {first} comes where {position + 1} is next; send from there on",
                source=f"producer '{name}'",
            )
        self._check_room(name)
        return first or 1

    def _check_room(self, name: str) -> None:
        """Raise UsageError if the position of a new name cannot be stored. Names without a frame are not stored."""
        if name not in self._positions.producers and self.num_producers >= self._max_producers:
            raise UsageError(f"producer '{name}': positions of {self._max_producers} producers are kept, and no more")

    def _tell_if_done(self, stream: Stream) -> None:
        """Acknowledge a frame that was applied, if there is no checkpoint to wait for."""
        if not self.is_durable:
            self._acknowledge(stream, self._now().ack(stream, stream.tally, durable=False))

    def _acknowledge(self, stream: Stream, ack: Ack) -> None:
        if ack.position > stream.acked.position:
            stream.acked = ack
            stream.tell(ack)

    def _now(self, copied: bool = False) -> Held:
        """Return the current positions. copied : whether later changes must not show in them"""
        positions, tallies = self._positions.producers, self._positions.tallies
        if copied:
            positions, tallies = dict(positions), dict(tallies)
        return Held(self._engine.global_step, self._engine.gate.num_accumulated, positions, tallies)


def _named(frame: Frame, contributor: str | None) -> Frame:
    """Return a frame with the stream's contributor, if its rows have none."""
    if contributor is None or frame.contributor is not None:
        return frame
    audit = frame.audit and partial(_audited, frame, contributor)
    return replace(frame, contributor=contributor, audit=audit)


def _audited(frame: Frame, contributor: str) -> Frame:
    return replace(frame.audited(), contributor=contributor)
