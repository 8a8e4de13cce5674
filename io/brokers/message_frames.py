"""Decode the messages of a broker: each is an Arrow IPC stream, and its rows are one frame."""

from __future__ import annotations

import io
from contextlib import ExitStack

from penstock.errors import InputError
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.batch import Parts, Source
from penstock.io.sources.ipc_stream import open_stream

# The reason under which messages are counted that ``on_bad_row`` drops as a whole.
BAD_MESSAGE = "bad_message"


class MessageFrames:
    """Decodes messages. first_bad : the first row dropped for each reason"""

    def __init__(self, options: ReadOptions, most_bytes: int, first_bad: dict[str, str]) -> None:
        self._options, self._most_bytes, self._first_bad = options, most_bytes, first_bad

    def decode(self, data: bytes | None, name: str) -> Frame | None:
        """Return the frame of a message; None if it has no rows. name : of the message

        Raises InputError if the message is not a frame: then nothing of it is applied.
        """
        if data is None:
            raise InputError("the value is null, expected an Arrow IPC stream", source=name, reason=BAD_MESSAGE)
        if len(data) > self._most_bytes:
            problem = f"{len(data):,} bytes, expected {self._most_bytes:,} at most (--max-message)"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)

        def parts() -> Parts:
            with ExitStack() as stack:
                part = open_stream(io.BytesIO(data), name, stack, self._options.allow_missing_end)
                part.ends_are_marked = True  # the end of the message ends its frame, and no batch does
                yield part

        reader = FrameReader(Source(name, parts), self._options)
        reader.first_bad = self._first_bad
        frames = list(reader)
        if len(frames) > 1:
            places = [f"({frame.local_step}, {frame.contributor})" for frame in frames[:2]]
            problem = f"rows of several (step, contributor), {' and '.join(places)}; send one frame per message"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        return frames[0] if frames else None
