"""The state of a producer's stream in the intake, and a snapshot of the positions of all streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.checkpoint.source_positions import Tally
from penstock.io.flight.messages import Ack


@dataclass(eq=False)
class Stream:
    """One stream of frames. contributor : its producer's name; None: its frames are counted in this stream only

    next : the number of the next frame; tally : counts of this stream
    acked : the last acknowledgement sent; promised : the one to send once the commit in flight is durable
    """

    contributor: str | None
    next: int
    tell: Callable[[Ack], None]
    tally: Tally
    acked: Ack = field(init=False)
    promised: Ack = field(init=False)

    @property
    def position(self) -> int:
        return self.next - 1


class Snapshot(NamedTuple):
    """A snapshot of the positions of all producers. pending : frames in the gate; positions, tallies : by producer"""

    step: int
    pending: int
    positions: Mapping[str, int]
    tallies: Mapping[str, Tally]

    def tally(self, contributor: str | None, identifier: str | None) -> Tally:
        """Return the initial counts of a new stream: those of the stream that it continues, else zeros."""
        last = None if contributor is None or identifier is None else self.tallies.get(contributor)
        return last if last is not None and last.stream == identifier else Tally(identifier)

    def ack(self, stream: Stream, tally: Tally, durable: bool) -> Ack:
        """Return the acknowledgement of a stream at this snapshot. tally : its counts up to here"""
        name = stream.contributor
        position = stream.position if name is None else self.positions.get(name, 0)
        return Ack(position, durable, self.step, False, tally.applied, tally.stale, self.pending, tally.dropped)
