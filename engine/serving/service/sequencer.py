"""The sequencer of the service: applies the frames of all producers in one order, and commits them.

Frames enter one by one under the gate's lock, so the tables, the positions of the producers and the commits of both
always agree. No code here waits for a producer or a reader: messages to them are passed to streams, which have
dedicated threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.api.engine import Engine
from penstock.api.live_reads import check_on_host
from penstock.base.errors import InputError, ServiceError, StateError, UsageError
from penstock.base.events import FrequentEvent, report
from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.rollbacks import Rollback
from penstock.checkpoint.store import Folder
from penstock.checkpoint.versions import delete_tag
from penstock.core.observers import Context
from penstock.model.frames import Frame, FrameRun
from penstock.model.learning_rates import LearningRates
from penstock.model.stats import Counters
from penstock.serving.flight.messages import Ack, PutRequest
from penstock.serving.service.delta_log import DeltaLog
from penstock.serving.service.streams import Stream, Streams

# How often a stream that waits for other workers looks whether it is over.
LOOK_S = 0.2


@dataclass(frozen=True)
class Saving:
    """The checkpoint. every : steps between two commits; resume : whether the engine was restored from ``folder``"""

    folder: Folder
    every: int | None = None
    resume: bool = False


class RoundWait(NamedTuple):
    """missing : the workers that a step waits for; none: it waits for nobody"""

    step: int
    missing: list[str]
    waited_s: float


class TagRequest(NamedTuple):
    """step : of the commit; keep : how many tags stay whose names differ in the number at their end"""

    name: str
    step: int
    keep: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TagRequest:
        """Parse a request. Raises UsageError."""
        name, step, keep = (fields.get(field) for field in cls._fields)
        if not isinstance(name, str) or type(step) is not int or type(keep) is not int or keep < 1:
            raise UsageError('tag: expected {"name": NAME, "step": STEP, "keep": N}, N at least 1')
        return cls(name, step, keep)


class Sequencer(CommitListener):
    """The only way for frames into the engine of a service.

    rates : learning rates, which the rates of frames are combined with
    log : is notified of steps and commits, under the gate's lock
    max_producers : names whose positions are stored
    failed : called when the service cannot continue, but not by ``end``
    saving : None: no checkpoint. The epoch of this start is durable once the sequencer is constructed

    ended : set when no more frames are taken and every applied frame is durable, or the commit has failed
    error : the error that ended it; None if ``end`` did
    """

    def __init__(
        self,
        engine: Engine,
        rates: LearningRates,
        log: DeltaLog,
        max_producers: int,
        failed: Callable[[], object],
        saving: Saving | None,
    ) -> None:
        engine.core.check_ready()
        if engine.is_shared:
            check_on_host(engine.core)
        self._engine, self._log, self._on_failure = engine, log, failed
        self.counters = Counters()
        self.rates, self._context = rates, Context(rates, self.counters)
        self.first_bad: dict[str, str] = {}  # the first row dropped, or frame rejected, for each reason
        self._stale_event = FrequentEvent("stale_frame")
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.is_closing = False
        if saving is None or not saving.resume:
            engine.session.positions.lineage = None
        self.streams = Streams(engine, max_producers, saving is not None)
        # Set when the commit in flight is durable, when the next one is, and both at the end.
        self._in_flight, self._next_commit = threading.Event(), threading.Event()
        engine.core.start_counting()
        engine.core.rates = rates
        engine.session.ledger.count_into(self.counters)
        self._commits: CommitSession | None = None
        if saving is not None:
            self._commits = engine.session.commits(saving.folder, saving.every, saving.resume, self)
        try:
            if self._commits is not None:
                self._commits.commit_start()
            if engine.is_shared:  # only now there is an epoch whose commit is on disk
                engine.publish()
                with engine.gate.still():
                    engine.reads.begin_epoch()
        except BaseException:
            if self._commits is not None:
                self._commits.abandon()
            raise

    # ---- streams

    def position(self, contributor: str) -> int:
        """Return the number of a producer's last frame that was applied."""
        with self._engine.gate.still():
            return self.streams.position(contributor)

    def open(
        self, request: PutRequest, notify: Callable[[Ack], None], replaced: Callable[[], object] = lambda: None
    ) -> Stream:
        """Open a stream. An earlier stream of the same contributor ends.

        notify : sends an acknowledgement to the producer; replaced : called when a later stream begins. Neither blocks
        Raises UsageError or InputError if the stream cannot begin at its first frame, ServiceError if the service ends.
        """
        with self._engine.gate.still():
            self._check_open()
            self.streams.look_again()
            return self.streams.open(request, notify, replaced)

    def push(self, stream: Stream, frame: Frame, number: int | None = None) -> None:
        """Apply one frame, or skip it if it was applied before.

        number : of the frame, if numbers have gaps; None: the next one

        Raises InputError for an invalid frame (nothing of it is applied), ServiceError if the service takes no more
        frames, UsageError if another stream of the producer has begun or its position cannot be stored.
        """
        with self._engine.gate.still():
            self._check_open()
            step = self._engine.global_step
            stream.next = stream.next if number is None else number
            if self.streams.skips(stream):
                stream.next += 1
            else:
                self._apply(stream, frame.named(stream.contributor))
            self.streams.acknowledge(stream)
            ready = self.streams.with_room() if self._engine.global_step != step else ()
        for each in ready:  # without the lock, which they need
            each.look.set()

    def wait_for_room(self, stream: Stream, is_over: Callable[[], bool]) -> None:
        """Wait, before a frame is pushed, while as many of its worker wait for their turn as may.

        is_over : whether the stream is, which ends the wait, too
        """
        turns, name = self._engine.core.turns, stream.contributor
        if turns is None or name is None or not turns.is_full(name):  # without the lock: only this stream adds frames
            return
        while True:
            with self._engine.gate.still():
                is_wanted = self.streams.is_newest(stream) and not (self.is_closing or stream.has_left)
                if not (is_wanted and turns.is_full(name)):
                    return
                stream.look.clear()
            stream.look.wait(LOOK_S)
            if is_over():
                return

    def claim(self, contributor: str, process: str) -> int:
        """Take no more frames of a producer's earlier streams. process : identifies that of the streams that follow

        Returns the number of the claim. Raises UsageError if the position of the name cannot be stored.
        """
        with self._engine.gate.still():
            self.streams.look_again()
            return self.streams.claim(contributor, process)

    def leave(self, contributor: str, process: str) -> None:
        """End the wait of a producer's stream, whose end cannot be read before."""
        with self._engine.gate.still():
            self.streams.leave(contributor, process)
            self.streams.look_again()

    def pass_over(self, stream: Stream, number: int, reason: str | None = None) -> None:
        """Count a number as applied that has no frame. reason : of a frame that is dropped as a whole"""
        with self._engine.gate.still():
            self._check_open()
            stream.next = number
            if self.streams.skips(stream):
                return
            tally = stream.tally
            if reason is not None:
                self.counters.dropped[reason] += 1
                tally = tally._replace(dropped=dict(Counter(tally.dropped) + Counter([reason])))
            turns = self._engine.core.turns
            if turns is None or stream.contributor is None or turns.names.number_of(stream.contributor) is None:
                self.streams.count(stream, tally)
                if self._commits is not None:
                    self._commits.frame_counted()
            else:  # the worker has its turn all the same
                stream.tally = tally
                self._apply(stream, Frame({}, 0, contributor=stream.contributor))
                self.streams.look_again()
            self.streams.acknowledge(stream)

    def rejected(self, error: InputError) -> None:
        """Record a rejected frame: the first error for each reason is reported."""
        with self._engine.gate.still():
            self.first_bad.setdefault(error.reason or "refused", str(error))

    def finish(self, stream: Stream) -> bool:
        """Request a commit after a stream's last frame. Return whether there is an acknowledgement to wait for.

        Raises UsageError if another stream of the producer has begun before its end.
        """
        with self._engine.gate.still():
            self.streams.finish(stream)
            return stream.acked.position < stream.position and (self._commits is None or self._commits.ask())

    def close(self, stream: Stream) -> None:
        with self._engine.gate.still():
            self.streams.close(stream)

    # ---- commits

    def ask_for_commit(self) -> bool:
        """Request a commit. Return False if everything is durable already, or there is no checkpoint."""
        with self._engine.gate.still():
            return self._commits is not None and self._commits.ask()

    def commit(self) -> None:
        """Commit everything that was applied, and wait until it is durable.

        Raises ServiceError if that fails, UsageError without a checkpoint.
        """
        with self._engine.gate.still():
            self._check_open()
            if self._commits is None:
                raise UsageError("this service has no checkpoint: start it with --checkpoint DIR")
            if not self._commits.ask(again=True):
                return
            done = self._next_commit
        done.wait()
        if self.error is not None:
            raise ServiceError(f"the commit failed: {self.error}")

    def tag(self, request: TagRequest) -> int:
        """Commit, and give the commit a name. Returns its step.

        Raises UsageError without a checkpoint, StateError if the step is another one.
        """
        self.commit()
        session = self._engine.session
        step = self.streams.durable_step
        if step != request.step:
            raise StateError(f"tag '{request.name}': expected the rows of step {request.step}, and the step is {step}")
        session.tag(request.name, "", move=True)
        folder, prefix = session.folder, request.name.rstrip("0123456789")
        numbers = [name.removeprefix(prefix) for name in folder.tag_names() if name.startswith(prefix)]
        for number in sorted((text for text in numbers if text.isdecimal()), key=int)[: -request.keep]:
            delete_tag(folder, f"{prefix}{number}")
        return step

    def roll_back(self, version: str | int | None) -> Rollback:
        """Step forward to the rows of another commit, as one delta, and wait until it is durable.

        Raises UsageError without a checkpoint, StateError if there is no such version, ServiceError if it failed.
        """
        with self._engine.gate.still():
            self._check_open()
            if self._commits is None:
                raise UsageError("this service has no checkpoint, so no earlier commit: start it with --checkpoint DIR")
        state = self._engine.session.saved(version)
        with self._engine.gate.still():
            self._check_open()
            self._log.end_delta()
            try:
                done = self._engine.session.roll_back(state)
                self.streams.look_again()
                self._log.end_delta()
                self._commits.frame_counted(0)
            except BaseException as error:
                self._fail(error)
                raise
        report("rolled_back", step=done.step, to=done.target.step, frames=done.num_frames)
        self.commit()
        return done

    def commit_begins(self) -> None:
        self._in_flight, self._next_commit = self._next_commit, threading.Event()
        report("commit_began", step=self._engine.global_step)
        self.streams.commit_begins()
        self._log.commit_begins()

    def commit_is_on_disk(self) -> None:
        self.streams.commit_is_on_disk()
        self._in_flight.set()
        self._log.commit_is_on_disk()
        report("committed", step=self.streams.durable_step)

    def commit_failed(self, error: BaseException) -> None:
        self._fail(error)

    # ---- the end

    def end(self) -> None:
        """Take no more frames, commit what was applied, and notify every stream. Raises the error of the commit."""
        with self._engine.gate.still():
            if self.is_closing:
                return
            self.is_closing = True
            self.streams.look_again()
        try:
            if self._commits is not None:
                self._commits.end()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._notify_end()

    def _fail(self, error: BaseException) -> None:
        """Stop taking frames and committing, because of an error."""
        with self._engine.gate.still():
            if self.is_closing:
                return
            self.is_closing, self.error = True, error
            self.streams.look_again()
            if self._commits is not None:
                self._commits.close()
        self._notify_end()
        self._on_failure()

    def _notify_end(self) -> None:
        with self._engine.gate.still():
            self._in_flight.set()
            self._next_commit.set()
            self.streams.notify_end()
        self._log.close()
        self.ended.set()

    # ---- inside

    def _apply(self, stream: Stream, frame: Frame) -> None:
        """Apply a frame and count it, under the gate's lock. No code that can fail or commit may run between the push
        and the update of the position: a frame that was applied but not counted is applied again when it is resent."""
        step, watch = self._engine.global_step, self._engine.watch
        try:
            with watch.timed("sum"):
                pushed = self._engine.core.push(FrameRun.of(frame), self._context)
        except BaseException as error:
            if self._engine.core.failure.reason is not None:  # else nothing of the frame was applied
                self._fail(error)
            raise
        if pushed.full is not None:  # the gate cannot open: no frame can follow
            self._fail(pushed.full)
            self._check_open()  # raises
        taken = pushed.frame
        self.streams.count(stream, stream.tally.plus(taken, pushed.is_stale))
        if pushed.is_stale:
            sender = taken.contributor if stream.contributor is None else stream.contributor
            self._stale_event.report(contributor=sender, step=taken.local_step, global_step=step)
        try:
            if self._engine.global_step != step:
                self._log.stepped()
            if self._commits is not None:
                with watch.timed("save"):
                    self._commits.frame_counted()
                    if self._commits.is_due:
                        self._commits.ask()
                    self._commits.advance()
        except BaseException as error:
            self._fail(error)
            raise
        watch.sample(pushed, self._engine.core.gate, self._engine.core.last_rates or ())

    # ---- rounds

    def waits(self) -> RoundWait:
        """Return for whom a step waits."""
        turns = self._engine.core.turns
        with self._engine.gate.still():
            if turns is None or not turns.num_pending:
                return RoundWait(self._engine.global_step, [], 0.0)
            return RoundWait(self._engine.global_step, turns.missing(), turns.waited_s)

    def skip(self, wait: RoundWait) -> None:
        """Open the gate without the workers of a wait, if it lasts. Raises ServiceError."""
        turns = self._engine.core.turns
        with self._engine.gate.still():
            self._check_open()
            assert turns is not None
            now, step = self.waits(), wait.step
            if (now.step, now.missing) != (step, wait.missing) or now.waited_s < wait.waited_s:
                return
            try:
                self._engine.core.open_early(self._context)
                turns.skipped += 1
                self._log.stepped()
                self.streams.look_again()
                if self._commits is not None:
                    self._commits.frame_counted(0)
                    if self._commits.is_due:
                        self._commits.ask()
                    self._commits.advance()
            except BaseException as error:
                self._fail(error)
                raise
        report("round_skipped", step=step, workers=wait.missing)

    def check_not_failed(self) -> None:
        """Raise ServiceError after the error that ended the service."""
        if self.error is not None:
            raise ServiceError(f"the service has failed and ends ({self.error}); send again what was not acknowledged")

    def _check_open(self) -> None:
        self.check_not_failed()
        if self.is_closing:
            raise ServiceError("the service is ending; send again later what was not acknowledged")
