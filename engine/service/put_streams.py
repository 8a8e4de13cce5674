"""Streams of gradients from producers: decoded into frames, passed to the intake, and acknowledged."""

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

# gRPC reports a broken connection and the end of its stream in no fixed order.
CUT_IS_KNOWN_AFTER_S = 0.05
ACK_PAUSE_S = 0.01

# Shared memory per stream; a larger block would fit the cache less. A batch whose values are borrowed keeps its room
# until its frame is applied: two others must fit meanwhile.
SHARED_BYTES = 16 << 20
LENT_SHARE = 3


class Producers:
    """Takes the streams of all producers. options : how streams are decoded

    rows, held : budgets of the rows in unfinished frames and of the bytes that these keep in memory
    memory : budget of shared memory; num_shared : batches received through shared memory
    """

    def __init__(self, intake: Intake, options: ReadOptions, limits: Limits) -> None:
        self._intake, self._options, self._limits = intake, options, limits
        self.rows, self.held = Budget(limits.queued_rows), Budget(limits.queued_bytes)
        self.memory = Budget(limits.memory_bytes)
        self.num_shared = 0

    def put(self, context: flight.ServerCallContext, request: PutRequest, reader: Any, tell: Tell) -> Ack:
        """Read a stream to its end. Return the last acknowledgement, after it was sent.

        tell : sends a message to the producer; may block until the producer reads it
        Raises UsageError or InputError if the stream is invalid, ServiceError if the service ends or is full.
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
                # First acknowledge the last commit, so that the producer gets it before the error.
                if self._intake.is_closing:
                    self._intake.ended.wait()
                raise
            finally:
                self._intake.close(stream)

    @contextmanager
    def _shared(self, request: PutRequest, acks: Acks) -> Iterator[Shared | None]:
        """Yield shared memory for a stream; None if it requests none, or none is left."""
        if not request.memory or not self.memory.change(SHARED_BYTES):
            yield None
            return
        try:
            memory = Memory(SHARED_BYTES)
        except OSError:  # unsupported: the batches arrive over the network
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
    """A producer's stream, which checks batches before the frame reader gets them.

    every : whether every batch ends its frame; ``told`` : whether metadata marks the ends of frames
    read_once : returns whether a frame's values are read only once, by the sum
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
        """Return the part, which records the columns in use when its batches are requested."""

        def batches(columns: list[str]) -> Batches:
            self._used = columns
            return part.batches(columns)

        return replace(part, batches=batches)

    def read_chunk(self) -> Chunk:
        if self._shared is not None:
            self._shared.let_go()  # the previous batch was a whole frame, and has been applied
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
        """Raise ServiceError if the connection broke, InputError if the stream ended inside a frame."""
        if self._queue.num_rows:
            time.sleep(CUT_IS_KNOWN_AFTER_S)
        left = f"; {self._queue.num_rows} rows of a frame that is not whole are left out"
        if self._context.is_cancelled():
            raise ServiceError(f"{self._name}: the connection broke off{left if self._queue.num_rows else ''}")
        if self._told and self._queue.num_rows:
            raise InputError(f"the stream ended inside a frame{left}", source=self._name)


class Shared:
    """The shared memory that a stream's producer writes batches to. num_taken : batches read from it"""

    def __init__(self, memory: Memory, acks: Acks) -> None:
        self._memory, self._acks = memory, acks
        self.num_taken = self._num_told = self._untold_bytes = 0

    def batch(self, place: Place | Columns, schema: pa.Schema, name: str, may_lend: bool) -> Given:
        """Return the batch at a location. Raises InputError.

        may_lend : whether values may be borrowed, since the next batch is read only after these values were used
        """
        places = place.places if isinstance(place, Columns) else (place,)
        num_bytes = sum([each.length for each in places])
        given = self._memory.batch(place, schema, name, may_lend and num_bytes <= SHARED_BYTES // LENT_SHARE)
        self.num_taken += 1
        self._untold_bytes += num_bytes
        if given.copied is None:
            self.let_go()
        return given

    def let_go(self) -> None:
        """Allow the producer to overwrite all batches so far."""
        if self._num_told == self.num_taken:
            return
        hurry = self._untold_bytes >= SHARED_BYTES // 4
        self._acks.taken(self.num_taken, hurry)
        self._num_told = self.num_taken
        if hurry:
            self._untold_bytes = 0


class Acks:
    """Sends acknowledgements to a producer, on a dedicated thread, so that a slow producer delays no other.

    tell : sends a message; of several queued ones, only the newest of each kind
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
        """Report the number of batches released in shared memory. hurry : the producer may be waiting for room"""
        with self._changed:
            self._hurry = self._hurry or hurry
            self._say({"taken": count})

    def _say(self, said: Mapping[str, Any]) -> None:
        self._waiting |= said
        self._changed.notify_all()

    def wait_for(self, position: int) -> None:
        """Wait until a position is acknowledged, the service ends, or the producer has disconnected."""
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
            except (pa.ArrowException, flight.FlightError, OSError):  # the producer has disconnected
                with self._changed:
                    self._deaf = True
                    self._changed.notify_all()
                return
            # Many small frames share an acknowledgement: each message costs a thread switch on both sides.
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._hurry, ACK_PAUSE_S)
