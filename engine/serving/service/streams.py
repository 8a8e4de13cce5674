"""The open streams of a service's producers: the position of each producer, and the acknowledgements of its frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.api.engine import Engine
from penstock.base.errors import InputError, UsageError
from penstock.checkpoint.source_positions import Claim, Tally
from penstock.model.version import Lineage
from penstock.serving.flight.messages import Ack, PutRequest

# In place of the process of a claim, once it has finished.
FINISHED = ""
# The clocks of hosts that a service moves between differ by less.
MOST_AHEAD_NS = 86_400 * 10**9


@dataclass(eq=False)
class Stream:
    """One stream of frames. contributor : its producer's name; None: its frames are counted in this stream only

    next : the number of the next frame; tally : counts of this stream
    creation : of the topic that the frames are of; None: of none that has one
    replaced : called when another stream of the producer begins; must not block
    is_finished : whether all of its frames have come; has_left : whether its producer ends it
    look : set for a stream that waits for room, to look again
    acked : the last acknowledgement sent; promised : the one to send once the commit in flight is durable
    """

    contributor: str | None
    next: int
    notify: Callable[[Ack], None]
    tally: Tally
    acked: Ack = field(init=False)
    promised: Ack = field(init=False)
    creation: str | None = None
    replaced: Callable[[], object] = lambda: None
    is_finished: bool = False
    has_left: bool = False
    look: threading.Event = field(default_factory=threading.Event)

    @property
    def position(self) -> int:
        return self.next - 1

    def counts(self) -> dict[str, Any]:
        """Return the counts of the stream as plain data."""
        tally = self.tally
        return {
            "position": self.position,
            "applied": tally.applied,
            "stale": tally.stale,
            "dropped": dict(tally.dropped),
        }

    def acknowledge(self, ack: Ack) -> None:
        if ack.position > self.acked.position:
            self.acked = ack
            self.notify(ack)


def _replaced(contributor: str) -> UsageError:
    return UsageError(
        f"another stream of producer '{contributor}' has begun: this one ends; processes that push at the same time "
        "need different names"
    )


class ServicePosition(NamedTuple):
    """A snapshot of the positions of all producers. pending : frames in the gate; positions, tallies : by producer"""

    step: int
    pending: int
    positions: Mapping[str, int]
    tallies: Mapping[str, Tally]

    def tally(self, contributor: str | None, process: str | None) -> Tally:
        """Return the initial counts of a new stream: those of the stream that it continues, else zeros."""
        last = None if contributor is None or process is None else self.tallies.get(contributor)
        return last if last is not None and last.process == process else Tally(process)

    def ack(self, stream: Stream, tally: Tally, durable: bool) -> Ack:
        """Return the acknowledgement of a stream at this snapshot. tally : its counts up to here"""
        name = stream.contributor
        position = stream.position if name is None else self.positions.get(name, 0)
        return Ack(position, durable, self.step, False, tally.applied, tally.stale, self.pending, tally.dropped)


class Streams:
    """The open streams and the positions of all producers. Methods are called under the gate's lock.

    most : producers whose positions are stored, each from its first frame
    is_durable : whether to acknowledge frames only after their commit
    """

    def __init__(self, engine: Engine, most: int, is_durable: bool) -> None:
        self._engine, self._most, self.is_durable = engine, most, is_durable
        self._positions = engine.session.positions
        self._open: set[Stream] = set()
        self._newest: dict[str, Stream] = {}  # by contributor
        step, before = engine.global_step, self._positions.lineage
        # A restart from the checkpoint continues it with another epoch.
        self._positions.lineage = Lineage.new(step) if before is None else before.started(step)
        self._durable = self._promised = self._copied()

    @property
    def lineage(self) -> Lineage:
        """The history of steps."""
        assert self._positions.lineage is not None
        return self._positions.lineage

    @property
    def durable_step(self) -> int:
        """Return the global step of the last durable commit."""
        return self._durable.step

    @property
    def num_open(self) -> int:
        return len(self._open)

    def look_again(self) -> None:
        """Let the streams that wait for room look whether they still have to."""
        for stream in self._open:
            stream.look.set()

    def with_room(self) -> list[Stream]:
        """Return the streams that wait for room, and whose workers have no frame that waits for its turn."""
        turns = self._engine.core.turns
        if turns is None:
            return []
        waiting = [(stream, stream.contributor) for stream in self._open if not stream.look.is_set()]
        return [stream for stream, name in waiting if name is not None and not turns.num_early_of(name)]

    @property
    def producers(self) -> Mapping[str, int]:
        """Return the positions of all producers whose frames were counted, by name."""
        return self._positions.producers

    def position(self, contributor: str) -> int:
        """Return the number of a producer's frames that were applied."""
        return self.producers.get(contributor, 0)

    def durable_position(self, contributor: str) -> int:
        """Return the number of a producer's frames that are durable; without a checkpoint, that were applied."""
        return self._durable.positions.get(contributor, 0) if self.is_durable else self.position(contributor)

    def counts(self, contributor: str, process: str | None) -> dict[str, int]:
        """Return the step, the frames in the gate, and the counts of a producer's stream up to its position."""
        now = self._now()
        tally = now.tally(contributor, process)
        return {"step": now.step, "pending": now.pending, "applied": tally.applied, "stale": tally.stale}

    # ---- a stream

    def open(
        self, request: PutRequest, notify: Callable[[Ack], None], replaced: Callable[[], object] = lambda: None
    ) -> Stream:
        """Open a stream and send its first acknowledgement; an earlier one of its name ends.

        Raises UsageError and InputError.
        """
        name, now = request.contributor, self._now()
        if name is not None and request.process is not None:
            self._check_claim(name, request.process, request.claim)
        first = self._first(request)
        if name is not None and request.process is not None and request.claim is not None:
            self._store(name, Claim(request.claim, request.process))
        stream = Stream(name, first, notify, now.tally(name, request.process), replaced=replaced)
        # The first acknowledgement tells a producer which frames to resend.
        stream.acked, stream.promised = (
            snapshot.ack(stream, snapshot.tally(name, request.process), self.is_durable)
            for snapshot in (self._durable if self.is_durable else now, self._promised)
        )
        self._open.add(stream)
        if name is not None:
            self._end_newest(name)
            self._newest[name] = stream
            stream.creation = self._positions.creations.get(name)
        notify(stream.acked)
        return stream

    def claim(self, contributor: str, process: str) -> int:
        """End the earlier streams of a producer: of its frames, only those of one process count until it has finished.

        process : identifies that process
        Returns the claim's number. Raises UsageError if the position of the name cannot be stored.
        """
        known, newest = self._positions.claims.get(contributor), self._newest.get(contributor)
        self._check_room(contributor)
        # A restart may forget a claim, or remember one that had ended: then their times say which one is newer.
        claim = Claim(max(time.time_ns(), 0 if known is None else known.number + 1), process)
        self._store(contributor, claim)
        if newest is not None and newest.tally.process != process:
            self._end_newest(contributor)
            del self._newest[contributor]
        return claim.number

    def _check_claim(self, name: str, process: str, number: int | None) -> None:
        """Check that no other process has claimed a name since. number : of the process's own claim; None: it has none

        Raises UsageError.
        """
        known = self._positions.claims.get(name)
        latest = max(time.time_ns(), 0 if known is None else known.number)  # the clock may have gone back
        if number is not None and number > latest + MOST_AHEAD_NS:
            raise UsageError(f"claim: expected the number that the service gave, got {number}")
        if known is None or known.process == process:
            return
        if known.process != FINISHED if number is None else number < known.number:
            raise _replaced(name)

    def _store(self, name: str, claim: Claim) -> None:
        claims = self._positions.claims
        if name not in claims and name not in self.producers and len(claims) >= self._most:
            raise self._no_room(name)
        claims[name] = claim

    def finish(self, stream: Stream) -> None:
        """Note that all frames of a stream have come: one without a claim may follow, or with a later one.

        Raises UsageError if another stream of the producer has begun.
        """
        self.check_newest(stream)
        stream.is_finished = True
        name, process = stream.contributor, stream.tally.process
        claims = self._positions.claims
        if name is not None and name in claims and claims[name].process == process:
            claims[name] = claims[name]._replace(process=FINISHED)

    def _end_newest(self, contributor: str) -> None:
        earlier = self._newest.get(contributor)
        if earlier is not None and not earlier.is_finished:
            earlier.notify(replace(earlier.acked, closing=True))
            earlier.replaced()

    def close(self, stream: Stream) -> None:
        self._open.discard(stream)
        if stream.contributor is not None and self._newest.get(stream.contributor) is stream:
            del self._newest[stream.contributor]

    def skips(self, stream: Stream) -> bool:
        """Return whether the next frame of a stream was applied before. Raises UsageError if it may send none."""
        name = stream.contributor
        if name is None:
            return False
        self.check_newest(stream)
        if stream.next <= self.position(name):
            return True
        self._check_room(name)
        return False

    def leave(self, contributor: str, process: str) -> None:
        """Note that a producer ends its stream."""
        stream = self._newest.get(contributor)
        if stream is not None and stream.tally.process == process:
            stream.has_left = True

    def is_newest(self, stream: Stream) -> bool:
        """Return whether no other stream of the producer has begun."""
        return stream.contributor is None or self._newest.get(stream.contributor) is stream

    def check_newest(self, stream: Stream) -> None:
        """Raise UsageError if another stream of the producer has begun."""
        if not self.is_newest(stream):
            assert stream.contributor is not None
            raise _replaced(stream.contributor)

    def count(self, stream: Stream, tally: Tally) -> None:
        """Count the next number of a stream. tally : the counts of the stream with it"""
        stream.next += 1
        stream.tally = tally
        if stream.contributor is not None:
            self._positions.producers[stream.contributor] = stream.position
            self._positions.tallies[stream.contributor] = tally
            if stream.creation is not None:
                self._positions.creations[stream.contributor] = stream.creation

    def acknowledge(self, stream: Stream) -> None:
        """Acknowledge all frames of a stream so far, if there is no checkpoint to wait for."""
        if not self.is_durable:
            stream.acknowledge(self._now().ack(stream, stream.tally, durable=False))

    # ---- all streams

    def commit_begins(self) -> None:
        self._promised = self._copied()
        for stream in self._open:
            stream.promised = self._promised.ack(stream, stream.tally, durable=True)

    def commit_is_on_disk(self) -> None:
        self._durable = self._promised
        for stream in self._open:
            stream.acknowledge(stream.promised)

    def notify_end(self) -> None:
        """Send every producer its last acknowledgement again, marked as the last one."""
        for stream in self._open:
            stream.notify(replace(stream.acked, closing=True))

    # ---- inside

    def _first(self, request: PutRequest) -> int:
        """Return the number of a stream's first frame. Raises UsageError or InputError if it cannot begin there."""
        name, first = request.contributor, request.first
        if name is None:
            return 1
        position = self.position(name)
        if first is None and position:
            raise UsageError(
                f"producer '{name}': {position} of its frames are here already: give the number of the stream's first "
                f'frame ("first": {position + 1} continues)'
            )
        if first is not None and first > position + 1:
            raise InputError(
                f"a gap: got frame {first}, expected {position + 1}; send from there",
                source=f"producer '{name}'",
            )
        self._check_room(name)
        return first or 1

    def _check_room(self, name: str) -> None:
        """Raise UsageError if the position of a new name cannot be stored. Names without a frame are not stored."""
        if name not in self.producers and len(self.producers) >= self._most:
            raise self._no_room(name)

    def _no_room(self, name: str) -> UsageError:
        return UsageError(f"producer '{name}': positions of {self._most} producers are kept, and no more")

    def _now(self) -> ServicePosition:
        """Return the current positions, in which later changes show."""
        engine, positions = self._engine, self._positions
        return ServicePosition(engine.global_step, engine.core.num_pending, positions.producers, positions.tallies)

    def _copied(self) -> ServicePosition:
        now = self._now()
        return now._replace(positions=dict(now.positions), tallies=dict(now.tallies))
