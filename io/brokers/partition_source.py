"""A partition of a broker as a source of a replay: its messages, up to the one that is the last at the start."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import penstock.interrupts as interrupts
from penstock.errors import InputError, UsageError
from penstock.frames import Frame, Place
from penstock.io.brokers.broker_partition import Message, Partition
from penstock.io.brokers.message_frames import BAD_MESSAGE, MessageFrames
from penstock.io.brokers.partition_reader import PartitionReader
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.sources.batch import Parts, Source
from penstock.io.sources.seekable_source import SeekableSource

# How long a read waits for a message.
WAIT_S = 0.2


class PartitionSource(SeekableSource):
    """The frames of one partition. A place is the number of a frame, as the service stores it."""

    def __init__(self, partition: Partition, patience_s: float) -> None:
        super().__init__(partition.producer, _no_parts)
        self._partition, self._patience_s = partition, patience_s
        self._last = 0  # the number at which the reading ends
        self._ahead: Message | None = None  # read, but it arrived after the reading began
        self.seek(())

    def seek(self, place: Place) -> None:
        self._reader = PartitionReader(self._partition, place[0] if place else 0, self._patience_s)
        self._ahead = None

    def frames(
        self, options: ReadOptions, first_bad: dict[str, str], read: Callable[[Source], Iterable[Frame]]
    ) -> Generator[Frame, None, None]:
        """Return the frames of a reading, among them void ones: messages without rows, and those that are dropped."""
        if options.contribution_rows is not None:
            raise UsageError(f"--contribution-rows: a message of {self._partition.where} is a frame; leave it out")
        decoder = MessageFrames(read, options.max_message, options.allow_missing_end)
        while (message := self._next(self._last)) is not None:
            yield self._frame(message, decoder, options, first_bad)

    def fix_end(self) -> None:
        while (last := self._reader.last()) is None:
            interrupts.check()
        self._last = last

    def close(self) -> None:
        self._partition.close()

    def _next(self, last: int) -> Message | None:
        """Return the next message up to a number; None if there is none."""
        message, self._ahead = self._ahead, None
        while message is None and max(self._reader.position, self._partition.drained) < last:
            interrupts.check()
            message = self._reader.read(WAIT_S)
        if message is not None and message.number > last:
            message, self._ahead = None, message
        return message

    def _frame(
        self, message: Message, decoder: MessageFrames, options: ReadOptions, first_bad: dict[str, str]
    ) -> Frame:
        name, dropped = self._partition.place(message.number), {}
        try:
            frame = decoder.decode(message, name)
        except InputError as error:
            if options.on_bad_row == "error":
                raise
            first_bad.setdefault(BAD_MESSAGE, str(error))
            frame, dropped = None, {BAD_MESSAGE: 1}
        if frame is None:
            return Frame({}, 0, source=name, dropped=dropped, place=(message.number,), is_void=True)
        return frame


def _no_parts() -> Parts:
    yield from ()
