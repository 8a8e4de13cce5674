"""A partition of a broker as a source of a replay: its messages, up to the one that is the last at the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, UsageError
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.partitions.broker_partition import Message, Partition
from penstock.io.partitions.message_frames import MessageFrames
from penstock.io.partitions.partition_reader import PartitionReader
from penstock.io.patience import Patience
from penstock.io.registry import either
from penstock.io.sources.batch import Parts
from penstock.io.sources.seekable_source import GROWS, SeekableSource
from penstock.io.sources.source_kinds import SourceKind, source_kind, source_kinds
from penstock.model.frames import FrameRun, Position

# How long a read waits for a message.
WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True)
class TopicKind(SourceKind):
    """A kind of broker. ``serve`` takes frames from its topics by a flag named like its scheme.

    partitions : returns those of the topic that a URI names, in order; raises UsageError, or OSError if no broker is
        reachable
    """

    partitions: Callable[[str], Sequence[Partition]]
    read_once = GROWS
    grows = True

    @property
    def flag(self) -> str:
        return f"--{self.schemes[0].removesuffix('://')}"

    def open(self, uri: str, patience_s: float) -> list[PartitionSource]:
        name = uri.partition("?")[0].rpartition("@")[2]  # without a password
        partitions = Patience(patience_s, starts_over=False).call(
            lambda: self.partitions(uri),
            lambda error: InputError(f"the broker cannot be reached: {error}", source=name),
        )
        return [PartitionSource(partition, patience_s) for partition in partitions]


def topic_kinds() -> list[TopicKind]:
    return [kind for kind in source_kinds() if isinstance(kind, TopicKind)]


def partitions_of(uri: str, patience_s: float) -> list[Partition]:
    """Return the partitions of a topic, in order. Raises UsageError, as ``SourceKind.open``, and InputError."""
    kind = source_kind(uri)
    if not isinstance(kind, TopicKind):
        raise UsageError(f"{uri}: expected {either(kind.form for kind in topic_kinds())}")
    return [source.partition for source in kind.open(uri, patience_s)]


class PartitionSource(SeekableSource):
    """The frames of one partition. A position is the number of a frame, as the service stores it."""

    shortest_pause_s = 0.001

    def __init__(self, partition: Partition, patience_s: float) -> None:
        super().__init__(partition.producer, self._no_parts, is_ready=True)
        self.partition, self._patience_s = partition, patience_s
        self._last: int | None = None  # the number at which the reading ends
        self._waiting: deque[Message] = deque()  # read ahead
        self.seek(())

    def seek(self, position: Position, creation: str | None = None) -> None:
        self._reader = PartitionReader(self.partition, position[0] if position else 0, self._patience_s, creation)
        self._waiting.clear()
        self._last = None
        self._decoder: MessageFrames | None = None  # over all readings, which have messages of the same form

    @property
    def creation(self) -> str | None:
        return self._reader.creation

    def frames(self, options: ReadOptions, first_bad: dict[str, str]) -> Generator[FrameRun, None, None]:
        """Return the frames of a reading, among them void ones: messages without rows, and those that are dropped."""
        if options.contribution_rows is not None:
            raise UsageError(f"--contribution-rows: a message of {self.partition.description} is a frame; leave it out")
        self._decoder = self._decoder or MessageFrames(options, first_bad)
        last = self._last or 0
        while (message := self._next(last)) is not None:
            yield self._decoder.read(message, self.partition.place(message.number))

    def fix_end(self) -> None:
        if self._last is not None:  # a later reading takes what has arrived: to ask for the end waits for the broker
            if not self._waiting:
                self._waiting.extend(self._reader.read(0))
            self._last = self._waiting[-1].number if self._waiting else self._reader.position
            return
        while (last := self._reader.last()) is None:
            interrupts.check()
        self._last = last

    def acknowledge(self, position: Position) -> None:
        self.partition.acknowledge(position[0])

    def close(self) -> None:
        self.partition.close()

    def _next(self, last: int) -> Message | None:
        """Return the next message up to a number; None if there is none."""
        waiting = self._waiting
        while not waiting and max(self._reader.position, self.partition.drained) < last:
            interrupts.check()
            waiting.extend(self._reader.read(WAIT_S))
        return waiting.popleft() if waiting and waiting[0].number <= last else None

    def _no_parts(self) -> Parts:
        raise UsageError(f"{self.partition.description}: replay, validate and serve read topics, nothing else does")
        yield
