"""Decode the messages of a broker: each is an Arrow IPC stream, and its rows are one frame."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing

from penstock.errors import InputError
from penstock.frames import Frame
from penstock.io.brokers.broker_partition import Message
from penstock.io.sources.batch import Batches, Parts, Source
from penstock.io.sources.ipc_stream import open_stream

# The reason under which messages are counted that ``on_bad_row`` drops as a whole.
BAD_MESSAGE = "bad_message"


class MessageFrames:
    """Decodes messages. read : returns the frames of a source; most_bytes : of a message

    allow_missing_end : accept a message without an end marker
    """

    def __init__(self, read: Callable[[Source], Iterable[Frame]], most_bytes: int, allow_missing_end: bool) -> None:
        self._read, self._most_bytes, self._allow_missing_end = read, most_bytes, allow_missing_end

    def decode(self, message: Message, name: str) -> Frame | None:
        """Return the frame of a message; None if it has no rows. name : of the message, for errors

        Raises InputError if the message is not a frame: then nothing of it is applied.
        """
        data, place = message.data, (message.number,)
        if data is None:
            raise InputError("the value is null, expected an Arrow IPC stream", source=name, reason=BAD_MESSAGE)
        if len(data) > self._most_bytes:
            problem = f"{len(data):,} bytes, expected {self._most_bytes:,} at most (--max-message)"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)

        def parts() -> Parts:
            with ExitStack() as stack:
                part = open_stream(io.BytesIO(data), name, stack, self._allow_missing_end)
                part.ends_are_marked = True  # the end of the message ends its frame, and no batch does
                inner = part.batches

                def batches(columns: list[str]) -> Batches:
                    with closing(inner(columns)) as found:
                        for batch in found:
                            batch.after = lambda _: place
                            yield batch

                part.batches = batches
                yield part

        frames = list(self._read(Source(name, parts)))
        if len(frames) > 1:
            places = [f"({frame.local_step}, {frame.contributor})" for frame in frames[:2]]
            problem = f"rows of several (step, contributor), {' and '.join(places)}; send one frame per message"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        return frames[0] if frames else None
