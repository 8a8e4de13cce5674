"""Streams of gradients from producers: read frame by frame, handed to the intake, acknowledged as they are safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import InputError, ServiceError
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.flight.messages import Ack, Columns, Place, PutRequest, Words, read_words
from penstock.io.flight.shm_writer import Given, Memory
from penstock.io.flight.source import Chunk, chunks_part
from penstock.io.sources.batch import Batches, Part
from penstock.io.sources.opening import Source
from penstock.service.limits import Budget, Limits, Queue
from penstock.service.sequencer import Intake
from penstock.service.streams import Stream

Tell = Callable[[Mapping[str, Any]], None]

# gRPC tells that a connection broke, and that nothing more comes, in no fixed order.
CUT_IS_KNOWN_AFTER_S = 0.05
ACK_PAUSE_S = 0.01

# Of shared memory, per stream; more would be less in cache. A batch whose values are lent keeps its room until its
# frame is taken: two others are to have room meanwhile.
SHARED_BYTES = 16 << 20
LENT_SHARE = 3


class Producers:
    """Everything that comes in. options : how streams are read

    rows, held : what waits in unfinished frames, and the bytes it keeps; memory : what all streams share with their
    producers; num_shared : batches that came through shared memory
    """

    def __init__(self, intake: Intake, options: ReadOptions, limits: Limits) -> None:
        self._intake, self._options, self._limits = intake, options, limits
        self.rows, self.held = Budget(limits.queued_rows), Budget(limits.queued_bytes)
        self.memory = Budget(limits.memory_bytes)
        self.num_shared = 0

    def put(self, context: flight.ServerCallContext, request: PutRequest, reader: Any, tell: Tell) -> Ack:
        """Take in a stream to its end. Returns the last acknowledgement, which has been told by then.

        tell : sends one; may wait for the producer
        """
        name = f"producer '{request.contributor}'" if request.contributor is not None else f"producer {context.peer()}"
        with Acks(tell) as acks, self._shared(request, acks) as shared:
            stream = self._intake.open(request, acks.put)
            try:
                self._take_all(context, stream, reader, name, request.ends, shared)
                if self._intake.finish(stream):
                    acks.wait_for(stream.position)
                    if acks.last.position < stream.position:
                        raise ServiceError(
                            f"{name}: frames after {acks.last.position} are not committed; send them again"
                        )
                return acks.last
            except ServiceError:
                # It is told what the last commit holds before it is told to go.
                if self._intake.is_closing:
                    self._intake.ended.wait()
                raise
            finally:
                self._intake.close(stream)

    @contextmanager
    def _shared(self, request: PutRequest, acks: Acks) -> Iterator[Shared | None]:
        """Memory for a stream that asks for some, where there is some left."""
        if not request.memory or not self.memory.change(SHARED_BYTES):
            yield None
            return
        try:
            memory = Memory(SHARED_BYTES)
        except OSError:  # batches come the ordinary way then
            self.memory.change(-SHARED_BYTES)
            yield None
            return
        try:
            acks.offer(memory.offer())
            yield Shared(memory, acks)
        finally:
            memory.close()
            self.memory.change(-SHARED_BYTES)

    def _take_all(
        self,
        context: flight.ServerCallContext,
        stream: Stream,
        reader: Any,
        name: str,
        ends: bool,
        shared: Shared | None,
    ) -> None:
        queue = Queue(self._limits, self.rows, self.held, name)
        try:
            every = not ends and self._batches_are_frames(reader.schema)
            read_once = self._intake.reads_once
            watched = _Watched(context, stream, reader, queue, name, every, ends, shared, read_once)
            part = watched.part(chunks_part(watched, name, ends))
            frames = FrameReader(Source(name, lambda: _one(part)), self._options)
            frames.first_bad = self._intake.first_bad
            with closing(frames.numbered()) as numbered:
                for _, frame in numbered:
                    self._intake.take(stream, frame)
                    queue.frame_taken()
        except InputError as error:
            self._intake.refused(error)
            raise
        finally:
            queue.clear()
            self.num_shared += 0 if shared is None else shared.num_taken

    def _batches_are_frames(self, schema: pa.Schema) -> bool:
        step = self._options.columns.get("step", "step")
        return step not in schema.names and self._options.contribution_rows is None


def _one(part: Part) -> Generator[Part, None, None]:
    yield part


class _Watched:
    """A producer's stream on its way to the frame reader: looked at before that sees it.

    every : every batch ends its frame; told : batches say where frames end
    read_once : whether what reads a frame's values adds them at once
    """

    def __init__(
        self,
        context: flight.ServerCallContext,
        stream: Stream,
        reader: Any,
        queue: Queue,
        name: str,
        every: bool,
        told: bool,
        shared: Shared | None,
        read_once: Callable[[], bool],
    ) -> None:
        self._context, self._stream, self._reader, self._queue = context, stream, reader, queue
        self._name, self._every, self._told, self._shared = name, every, told, shared
        self._read_once = read_once
        self._used: list[str] = []
        self.schema = reader.schema

    def part(self, part: Part) -> Part:
        """The same part; from when its batches are asked for, it is known which columns are used."""

        def batches(columns: list[str]) -> Batches:
            self._used = columns
            return part.batches(columns)

        return replace(part, batches=batches)

    def read_chunk(self) -> Chunk:
        if self._shared is not None:
            self._shared.let_go()  # of a batch that was a frame: it has been taken, or this is not called
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            self._check_end()
            raise
        words = read_words(chunk.app_metadata)
        if words.number is not None and self._stream.contributor is not None and words.number != self._stream.next:
            raise InputError(f"frame {words.number} came where frame {self._stream.next} is next", source=self._name)
        given = Given(chunk.data) if words.place is None else self._lies_at(words.place, words, chunk.data)
        if given.data is None:
            return Chunk(None, words.ends)
        waits = given.data.num_rows > 0 and not self._ends_frame(words)
        data, copied = self._queue.admit(given.data, self._used, waits), given.copied
        return Chunk(data, words.ends, None if copied is None else lambda: copied().select(self._used))

    def _ends_frame(self, words: Words) -> bool:
        return words.ends or self._every

    def _lies_at(self, place: Place | Columns, words: Words, data: pa.RecordBatch | None) -> Given:
        if self._shared is None or data is not None:
            problem = "a batch lies in shared memory, " + ("which this stream has not" if data is None else "and came")
            raise InputError(problem, source=self._name)
        is_frame = self._ends_frame(words) and not self._queue.num_rows
        return self._shared.batch(place, self.schema, self._name, is_frame and self._read_once())

    def _check_end(self) -> None:
        """A frame that has begun is whole only where the producer said that this was all."""
        if self._queue.num_rows:
            time.sleep(CUT_IS_KNOWN_AFTER_S)
        left = f"; {self._queue.num_rows} rows of a frame that is not whole are left out"
        if self._context.is_cancelled():
            raise ServiceError(f"{self._name}: the connection broke off{left if self._queue.num_rows else ''}")
        if self._told and self._queue.num_rows:
            raise InputError(f"the stream ended inside a frame{left}", source=self._name)


class Shared:
    """Memory that a stream's producer writes batches to. num_taken : batches that came from there"""

    def __init__(self, memory: Memory, acks: Acks) -> None:
        self._memory, self._acks = memory, acks
        self.num_taken = self._num_told = self._untold_bytes = 0

    def batch(self, place: Place | Columns, schema: pa.Schema, name: str, may_lend: bool) -> Given:
        """may_lend : whether the next batch is not asked for before this one's values are done with"""
        places = place.places if isinstance(place, Columns) else (place,)
        num_bytes = sum([each.length for each in places])
        given = self._memory.batch(place, schema, name, may_lend and num_bytes <= SHARED_BYTES // LENT_SHARE)
        self.num_taken += 1
        self._untold_bytes += num_bytes
        if given.copied is None:
            self.let_go()
        return given

    def let_go(self) -> None:
        """The producer may write over all that came so far."""
        if self._num_told == self.num_taken:
            return
        hurry = self._untold_bytes >= SHARED_BYTES // 4
        self._acks.taken(self.num_taken, hurry)
        self._num_told = self.num_taken
        if hurry:
            self._untold_bytes = 0


class Acks:
    """Tells a producer how far it is, on a thread of its own: one that does not listen keeps nobody else waiting.

    tell : sends what is said; of what waits only the newest
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: dict[str, Any] = {}
        self._over = self._deaf = self._hurry = False
        self.last = Ack(0, False, 0)
        self._thread = threading.Thread(target=self._run, name="penstock-acks", daemon=True)

    def put(self, ack: Ack) -> None:
        with self._changed:
            self.last = ack
            self._say(ack.said())

    def offer(self, memory: Mapping[str, Any]) -> None:
        with self._changed:
            self._say({"memory": memory})

    def taken(self, count: int, hurry: bool) -> None:
        """So many batches in shared memory have been let go. hurry : the producer may wait for the room"""
        with self._changed:
            self._hurry = self._hurry or hurry
            self._say({"taken": count})

    def _say(self, said: Mapping[str, Any]) -> None:
        self._waiting |= said
        self._changed.notify_all()

    def wait_for(self, position: int) -> None:
        """Until a position is acknowledged, or the service ends, or the producer has gone."""
        with self._changed:
            self._changed.wait_for(lambda: self.last.position >= position or self.last.closing or self._deaf)

    def __enter__(self) -> Acks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                said, self._waiting, self._hurry = self._waiting, {}, False
            if not said:
                return
            try:
                self._tell(said)
            except (pa.ArrowException, flight.FlightError, OSError):  # the producer has gone
                with self._changed:
                    self._deaf = True
                    self._changed.notify_all()
                return
            # Who sends many small frames hears of several at once: each word costs both sides a turn of a thread.
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._hurry, ACK_PAUSE_S)
