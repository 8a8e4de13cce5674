"""Decode the messages of a broker: each is an Arrow IPC stream, and its rows are one frame."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from penstock.errors import InputError
from penstock.frames import Frame, as_frame
from penstock.io.connectors.broker_partition import Message
from penstock.io.decoding.batch_pieces import BatchPieces
from penstock.io.decoding.framing import FrameBuilder
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.sources.batch import Batch
from penstock.io.sources.checksums import is_log
from penstock.io.sources.ipc_stream import open_bytes
from penstock.io.sources.repeated_streams import RepeatedStreams

# The reason under which messages are counted that ``on_bad_row`` drops as a whole.
BAD_MESSAGE = "bad_message"


class MessageFrames:
    """Decodes the messages of one partition. first_bad : the first bad row for each reason, as an error message"""

    def __init__(self, options: ReadOptions, first_bad: dict[str, str]) -> None:
        self._options, self._first_bad = options, first_bad
        # Of the last message that was read as any stream; most have the same schema.
        self._columns: BatchPieces | None = None
        self._repeated: RepeatedStreams | None = None

    def read(self, message: Message, name: str) -> Frame:
        """Return the frame of a message; a void one if it has no rows, or is dropped as a whole. Raises InputError."""
        frame, dropped = None, {}
        try:
            frame = self.decode(message, name)
        except InputError as error:
            if self._options.on_bad_row == "error":
                raise
            self._first_bad.setdefault(BAD_MESSAGE, str(error))
            dropped = {BAD_MESSAGE: 1}
        return frame or Frame({}, 0, source=name, dropped=dropped, position=(message.number,), is_void=True)

    def decode(self, message: Message, name: str) -> Frame | None:
        """Return the frame of a message; None if it has no rows. name : of the message, for errors

        Raises InputError if the message is not a frame: then nothing of it is applied.
        """
        data, position, most = message.data, (message.number,), self._options.max_message
        if data is None:
            raise InputError("the value is null, expected an Arrow IPC stream", source=name, reason=BAD_MESSAGE)
        if len(data) > most:
            problem = f"{len(data):,} bytes, expected {most:,} at most (--max-message)"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        builder = FrameBuilder(self._options, self._first_bad)
        frames: list[Frame] = []
        with closing(self._batches(data, name)) as batches:
            for columns, batch in batches:
                batch.after = lambda _: position
                if batch.data.num_rows:
                    for piece in columns.pieces(batch):
                        frames += map(as_frame, builder.add(piece))
        frames += map(as_frame, builder.end())
        if len(frames) > 1:
            heads = [f"({frame.local_step}, {frame.contributor})" for frame in frames[:2]]
            problem = f"rows of several (step, contributor), {' and '.join(heads)}; send one frame per message"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        return frames[0] if frames else None

    def _batches(self, data: bytes, name: str) -> Generator[tuple[BatchPieces, Batch], None, None]:
        if self._repeated is not None and self._columns is not None:
            batch = self._repeated.read(data)
            if batch is not None:
                yield self._columns, Batch(name, batch, 0, 0)
                return
        part = open_bytes(data, name, self._options.allow_missing_end)
        columns = BatchPieces(part, self._options)
        with closing(part.batches(columns.names)) as batches:
            for each in batches:
                yield columns, each
        self._columns, self._repeated = columns, None if is_log(part.schema) else RepeatedStreams(data, part.schema)
