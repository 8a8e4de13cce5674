"""Decode the messages of a broker: each is an Arrow IPC stream, and its rows are one frame."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from penstock.base.errors import InputError
from penstock.io.decoding.batch_pieces import BatchPieces
from penstock.io.decoding.framing import FrameBuilder
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.rows import rows_of
from penstock.io.partitions.broker_partition import Message
from penstock.io.sources.batch import Batch
from penstock.io.sources.checksums import is_log
from penstock.io.sources.ipc_messages import END_MARKER
from penstock.io.sources.ipc_stream import open_bytes
from penstock.io.sources.plain_messages import PlainMessages, head_of
from penstock.model.frames import Frame, FrameRun

# The reason under which messages are counted that ``on_bad_row`` drops as a whole.
BAD_MESSAGE = "bad_message"


class MessageFrames:
    """Decodes the messages of one partition. first_bad : the first bad row for each reason, as an error message"""

    def __init__(self, options: ReadOptions, first_bad: dict[str, str]) -> None:
        self._options, self._first_bad = options, first_bad
        # Of the last message that was read as any stream; most have the same schema.
        self._columns: BatchPieces | None = None
        self._head = b""  # its schema message
        self._plain: PlainMessages | None = None  # reads the batch after it

    def read(self, message: Message, name: str) -> FrameRun:
        """Return the frame of a message; a void one if it has no rows, or is dropped as a whole.

        Raises InputError.
        """
        if (run := self._plain_run(message, name)) is not None:
            return run
        frame, dropped = None, {}
        try:
            frame = self.decode(message, name)
        except InputError as error:
            if self._options.on_bad_row == "error":
                raise
            self._first_bad.setdefault(BAD_MESSAGE, str(error))
            dropped = {BAD_MESSAGE: 1}
        void = Frame({}, 0, source=name, dropped=dropped, position=(message.number,), is_void=True)
        return FrameRun.of(frame or void)

    def decode(self, message: Message, name: str) -> Frame | None:
        """Return the frame of a message; None if it has no rows. name : of the message, for errors

        Raises InputError if the message is not a frame: then nothing of it is applied.
        """
        data, most = message.data, self._options.max_message
        if data is None:
            raise InputError("the value is null, expected an Arrow IPC stream", source=name, reason=BAD_MESSAGE)
        if len(data) > most:
            problem = f"{len(data):,} bytes, expected {most:,} at most (--max-message)"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        builder = FrameBuilder(self._options, self._first_bad)
        runs: list[FrameRun] = []
        with closing(self._batches(message, name)) as batches:
            for columns, batch in batches:
                if batch.num_rows:
                    for piece in columns.pieces(batch):
                        runs += builder.add(piece)
        runs += builder.end()
        frames = [run.frame_at(number) for run in runs for number in range(len(run))]
        if len(frames) > 1:
            heads = [f"({frame.local_step}, {frame.contributor})" for frame in frames[:2]]
            problem = f"rows of several (step, contributor), {' and '.join(heads)}; send one frame per message"
            raise InputError(problem, source=name, reason=BAD_MESSAGE)
        return frames[0] if frames else None

    def _plain_run(self, message: Message, name: str) -> FrameRun | None:
        """Return a message as a run of one frame; None: ``decode`` reads it, and reports what is wrong."""
        data, plain, columns = message.data, self._plain, self._columns
        if plain is None or columns is None or data is None or not data.startswith(self._head):
            return None
        batches = plain.read(data, len(self._head), name, 0, 0) if len(data) <= self._options.max_message else None
        if batches is None or len(batches.offsets) != 2 or data[batches.offsets[1] :] != END_MARKER:
            return None
        rows, table, position = batches.rows, plain.columns.table, (message.number,)
        if len(rows.bounds) != 2:  # several frames
            return None

        def audit() -> Frame:
            frame = self.decode(message, name)
            assert frame is not None
            return frame.audited()

        def frame_at(_: int) -> Frame:
            step = None if rows.steps is None else int(rows.steps[0])
            return Frame(
                {table: (rows_of(rows.blocks, 0),)},
                batches.num_rows,
                step,
                source=name,
                audit=audit,
                position=position,
                drops=self._options.on_bad_row != "error",
            )

        return FrameRun(table, rows.blocks, rows.bounds, rows.steps, frame_at, (position,))

    def _batches(self, message: Message, name: str) -> Generator[tuple[BatchPieces, Batch], None, None]:
        data, position = message.data or b"", (message.number,)
        part = open_bytes(data, name, self._options.allow_missing_end)
        columns = BatchPieces(part, self._options)
        with closing(part.batches(columns.names)) as batches:
            for each in batches:
                each.after = lambda _: position
                yield columns, each
        self._head, self._columns = head_of(data), columns
        self._plain = None
        plain = columns.plain
        if self._head and plain is not None and plain.table_column is None and not is_log(part.schema):
            self._plain = PlainMessages(data[len(self._head) :], part.schema, plain)
