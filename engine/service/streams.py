"""A producer's stream of frames as the intake counts it, and what the service holds of all streams at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.checkpoint.source_positions import Tally
from penstock.io.flight.messages import Ack


@dataclass(eq=False)
class Stream:
    """One stream of frames. contributor : None: nobody counts its frames beyond it

    next : the number of the next frame; tally : what became of the frames of this stream
    acked : what its producer was told last; promised : what it is told once the commit in flight is on disk
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


class Held(NamedTuple):
    """What the service holds at one moment. pending : frames in the gate; positions, tallies : by producer"""

    step: int
    pending: int
    positions: Mapping[str, int]
    tallies: Mapping[str, Tally]

    def tally(self, contributor: str | None, identifier: str | None) -> Tally:
        """Of a stream that begins: that of the stream it continues, or zeros."""
        known = None if contributor is None or identifier is None else self.tallies.get(contributor)
        return known if known is not None and known.stream == identifier else Tally(identifier)

    def ack(self, stream: Stream, tally: Tally, durable: bool) -> Ack:
        """tally : of the stream's frames among those held"""
        name = stream.contributor
        position = stream.position if name is None else self.positions.get(name, 0)
        return Ack(position, durable, self.step, False, tally.applied, tally.stale, self.pending, tally.dropped)
