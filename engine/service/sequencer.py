"""Where the frames of all producers become one order: applied, counted per producer, acknowledged.

Frames enter one by one under the gate's lock, so that the tables, every producer's position and what
a commit holds of both never disagree. Nothing here waits for a producer or a reader: what they are
told is handed to streams that have threads of their own.
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
    """Who hears what happens to the tables. Under the gate's lock."""

    def commit_begins(self) -> None: ...

    def commit_is_on_disk(self) -> None: ...

    def stepped(self) -> None: ...

    def close(self) -> None: ...


class Intake(CommitListener):
    """The one way into the engine of a service.

    rates : learning rates, before and after what frames say
    steps : hears of steps and commits
    max_producers : names that positions are kept for, from the first frame on
    failed : called when nothing can go on, but not by ``end``

    ended : set when no frame is taken any more and everything taken is on disk, or has failed
    error : what ended it, where it was not ``end``
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
        self.first_bad: dict[str, str] = {}  # the first row left out, or frame refused, for each reason
        self._streams: set[Stream] = set()
        self._newest: dict[str, Stream] = {}  # by contributor
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._closing = False
        self._positions = engine.session.positions
        if not resume or self._positions.lineage is None:
            self._positions.lineage = secrets.token_hex(8)
        self._durable = self._promised = self._now(copied=True)
        self._waiting: list[threading.Event] = []  # for the next commit, and for the one under way
        self._served: list[threading.Event] = []
        engine.core.start_counting()
        engine.core.rates = rates
        engine.session.count_into(self.counters)
        self._commits = None if folder is None else engine.session.commits(folder, every, resume, self)

    @property
    def lineage(self) -> str:
        """Which history of steps this is: the same after a restart from the checkpoint, another one after any other."""
        assert self._positions.lineage is not None
        return self._positions.lineage

    @property
    def durable_step(self) -> int:
        """The global step of the last commit on disk."""
        return self._durable.step

    @property
    def is_closing(self) -> bool:
        """No frame is taken any more."""
        return self._closing

    @property
    def is_durable(self) -> bool:
        """Whether there is a checkpoint."""
        return self._commits is not None

    def reads_once(self) -> bool:
        """Whether values of a frame that comes now are looked at no more than once, while they are added.

        Where others are held they are judged first, for nothing that was added to those could be taken back.
        """
        gate = self._engine.gate
        return gate.num_required == 1 and not gate.num_accumulated

    # ---- streams

    def open(self, request: PutRequest, tell: Callable[[Ack], None]) -> Stream:
        """A stream begins; an earlier one of the same contributor ends at its next frame.

        tell : given what the producer is to be told; must not wait
        Raises UsageError or InputError where its first frame is not one that can come next.
        """
        name = request.contributor
        with self._engine.gate.still():
            self._check_open()
            now = self._now()
            stream = Stream(name, self._first(request), tell, now.tally(name, request.stream))
            # The first thing a producer hears is from where on it must send again.
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
        """Apply one frame, or recognise it as applied.

        Raises InputError for a bad one (nothing of it is applied) and ServiceError where no frame is taken any more.
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
        """A frame was not taken: the first of its kind is remembered for whoever looks."""
        with self._engine.gate.still():
            self.first_bad.setdefault(error.reason or "refused", str(error))

    def finish(self, stream: Stream) -> bool:
        """The producer has sent its last: commit soon what it waits for. False where it waits for nothing."""
        with self._engine.gate.still():
            return stream.acked.position < stream.position and (self._commits is None or self._commits.ask())

    def close(self, stream: Stream) -> None:
        with self._engine.gate.still():
            self._streams.discard(stream)
            if stream.contributor is not None and self._newest.get(stream.contributor) is stream:
                del self._newest[stream.contributor]

    # ---- positions and commits

    def position(self, contributor: str) -> int:
        """How many of its frames have been applied."""
        return self._positions.producers.get(contributor, 0)

    def durable_position(self, contributor: str) -> int:
        """How many of its frames nothing can take back."""
        return self._durable.positions.get(contributor, 0) if self.is_durable else self.position(contributor)

    @property
    def num_producers(self) -> int:
        return len(self._positions.producers)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def ask_for_commit(self) -> bool:
        """Commit soon. False where everything is on disk, or there is no checkpoint."""
        with self._engine.gate.still():
            return self._commits is not None and self._commits.ask()

    def commit(self) -> None:
        """Everything that has been applied is on disk. Raises ServiceError where it cannot be."""
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
        """Take no frame any more, commit what was taken, tell every stream. Raises what the commit met."""
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
        """Nothing can be taken or committed any more."""
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
        """Under the gate's lock. Between the push and the position nothing may come that can fail or commit: a frame
        that is in the tables and not counted is applied again when it is sent again."""
        step, watch = self._engine.global_step, self._engine.watch
        try:
            with watch.applying():
                taken, was_admitted = self._engine.core.push(frame, self._rates, self.counters)
        except BaseException as error:
            if self._engine.core.failed is not None:  # else nothing of the frame is in
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
                with watch.saving():
                    self._commits.frame_counted()
                    if self._commits.is_due:
                        self._commits.ask()
                    self._commits.advance()
        except BaseException as error:
            self._fail(error)
            raise
        watch.took(frame, self._engine.core.gate, self._engine.core.last_rates or ())

    def _check_open(self) -> None:
        if self.error is not None:
            raise ServiceError(f"the service has failed and ends ({self.error}); send again what was not acknowledged")
        if self._closing:
            raise ServiceError("the service is ending; send again later what was not acknowledged")

    def _check_newest(self, stream: Stream) -> None:
        if stream.contributor is not None and self._newest.get(stream.contributor) is not stream:
            raise UsageError(f"another stream of producer '{stream.contributor}' has begun: this one ends")

    def _first(self, request: PutRequest) -> int:
        """The number of a stream's first frame."""
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
        """A name takes room from its first frame on: one that only ever opens streams takes none."""
        if name not in self._positions.producers and self.num_producers >= self._max_producers:
            raise UsageError(f"producer '{name}': positions of {self._max_producers} producers are kept, and no more")

    def _tell_if_done(self, stream: Stream) -> None:
        """Without a checkpoint a frame that is applied is as safe as it will be."""
        if not self.is_durable:
            self._acknowledge(stream, self._now().ack(stream, stream.tally, durable=False))

    def _acknowledge(self, stream: Stream, ack: Ack) -> None:
        if ack.position > stream.acked.position:
            stream.acked = ack
            stream.tell(ack)

    def _now(self, copied: bool = False) -> Held:
        """copied : also what is held later leaves it as it is"""
        positions, tallies = self._positions.producers, self._positions.tallies
        if copied:
            positions, tallies = dict(positions), dict(tallies)
        return Held(self._engine.global_step, self._engine.gate.num_accumulated, positions, tallies)


def _named(frame: Frame, contributor: str | None) -> Frame:
    """A frame of a stream with a name, where its rows do not say who sent them."""
    if contributor is None or frame.contributor is not None:
        return frame
    audit = frame.audit and partial(_audited, frame, contributor)
    return replace(frame, contributor=contributor, audit=audit)


def _audited(frame: Frame, contributor: str) -> Frame:
    return replace(frame.audited(), contributor=contributor)
