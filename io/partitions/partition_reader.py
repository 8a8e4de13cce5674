"""Read a partition from a position on: over failures of the broker, with a check that nothing was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.base.errors import InputError, StateError
from penstock.io.partitions.broker_partition import Message, Partition
from penstock.io.patience import Patience
from penstock.io.sources.seekable_source import created_again

T = TypeVar("T")


class PartitionReader:
    """Reads messages in order, each once.

    position : the number of the last message read; at the start, of the last frame that the tables contain. 0: none,
        start with the first one retained
    patience_s : how long to retry while the broker is unreachable
    creation : of the topic that the position is of, as the partition names it; None: unknown. Later that of the topic
    """

    def __init__(self, partition: Partition, position: int, patience_s: float, creation: str | None = None) -> None:
        self.partition, self.position, self.creation = partition, position, creation
        self._patience = Patience(patience_s, starts_over=False)
        self._is_open = False

    def read(self, timeout_s: float) -> Sequence[Message]:
        """Return the next messages; none if none arrives in time, or the broker is unreachable.

        Raises InputError if the broker stays unreachable, StateError if messages after the position are gone, or the
        topic is another one, UsageError if the broker refuses the caller.
        """
        messages = self._call(lambda: self._read(timeout_s)) or []
        if messages:
            self.position = messages[-1].number
        return messages

    def last(self) -> int | None:
        """Return the highest number that the broker has now; None if it is unreachable at the moment. Raises as read"""
        return self._call(lambda: self.partition.retained_range().last)

    def _call(self, call: Callable[[], T]) -> T | None:
        """Call with the partition open; after a failure, pause and return None until patience is over."""
        try:
            if not self._is_open:
                self._open()
            result = call()
        except OSError as error:
            self._is_open = False
            self.partition.close()
            text = " ".join(str(error).split()) or type(error).__name__
            self._patience.wait(InputError(f"the broker cannot be reached: {text}", source=self.partition.description))
            return None
        self._patience.good()
        return result

    def _read(self, timeout_s: float) -> Sequence[Message]:
        messages, position = [], self.position
        for message in self.partition.read(timeout_s):
            if message.number > position:  # else it was delivered again
                if message.number > position + 1:
                    # The numbers before it were never messages, or are no longer retained.
                    self._check(position, min(self.partition.retained_range().first, message.number))
                position = message.number
                messages.append(message)
        return messages

    def _open(self) -> None:
        self._check_creation()
        retained = self.partition.retained_range()
        if not self.position:
            self.position = retained.first - 1
        self._check(self.position, retained.first)
        if self.position > retained.last and self.position >= retained.first:
            raise StateError(
                f"{self.partition.place(self.position)} is in the tables, and the topic ends before it, after "
                f"{retained.last} messages: it was emptied or replaced; use another checkpoint, or the former topic"
            )
        self.partition.seek(self.position + 1)
        self._is_open = True

    def _check_creation(self) -> None:
        """Check that the topic is the one that the position is of."""
        partition, creation = self.partition, self.partition.creation()
        if self.position and creation != self.creation:
            if creation is None:
                raise OSError(f"it gives no id of the {partition.kind}, and the position is of {self.creation}")
            if self.creation is not None:
                place = partition.place(self.position + 1)
                raise StateError(created_again(place, partition.kind, self.creation, creation))
        self.creation = creation

    def _check(self, position: int, first: int) -> None:
        if first > position + 1:
            raise StateError(
                f"{self.partition.place(position + 1)} is next, and the topic retains only what follows "
                f"{self.partition.place(first - 1)}; it needs a longer retention, and this state can get no further: "
                "start again from an older checkpoint and another copy of the messages"
            )
