"""A partition of a broker: numbered messages, each an Arrow IPC stream with the rows of one frame."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """number : of the frame, from 1, ascending, with gaps; data : None: the broker delivered no value"""

    number: int
    data: bytes | None


class RetainedRange(NamedTuple):
    """The numbers that a partition retains. first : the lowest one; last : the highest one; first - 1 if it is empty"""

    first: int
    last: int


class Partition(ABC):
    """A partition of a topic, for one thread at a time.

    Methods raise OSError if the broker cannot be reached, and may then be called again; UsageError if it refuses the
    caller or does not know the topic.

    producer : the name of its frames in checkpoints; description : for messages
    kind : what it is a partition of, for messages
    drained : no message up to this number follows the last one that ``read`` returned
    """

    kind = "topic"
    drained = 0

    def __init__(self, producer: str, description: str) -> None:
        self.producer, self.description = producer, description

    @abstractmethod
    def place(self, number: int) -> str:
        """Return where a message is, for messages."""

    def creation(self) -> str | None:
        """Ask the broker for what it gave the topic when it was created: another one has another. None: it has none.

        From then on ``read`` returns messages of no other topic, or, where the client cannot know, soon raises OSError.
        """
        return None

    @abstractmethod
    def retained_range(self) -> RetainedRange:
        """Ask the broker which numbers it retains."""

    @abstractmethod
    def seek(self, number: int) -> None:
        """Continue with the first message of at least this number."""

    @abstractmethod
    def read(self, timeout_s: float) -> Sequence[Message]:
        """Return the next messages; none if none arrives in time. Raises OSError if the broker has left meanwhile."""

    def acknowledge(self, number: int) -> None:  # noqa: B027 (not every broker shows it)
        """Report that all frames up to a number are durable. For display only: nothing depends on its success."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the next method opens another one."""
