"""Streams of gradients from producers: decoded into frames, passed to the sequencer, and acknowledged."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from penstock.base.errors import InputError, PenstockError, ServiceError
from penstock.base.events import FrequentEvent, report
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.opening import Source
from penstock.serving.flight.messages import EXCHANGE, Ack, PutRequest, read_metadata, schema_of
from penstock.serving.flight.source import Chunk, chunks_part
from penstock.serving.service.auth import ADMISSION, AdmittedCall
from penstock.serving.service.limits import Budget, Limits, Queue
from penstock.serving.service.sequencer import Sequencer
from penstock.serving.service.streams import Stream

Send = Callable[[bytes], None]

# gRPC reports a broken connection and the end of its stream in no fixed order.
BREAK_IS_REPORTED_AFTER_S = 0.05
# How long a stream whose producer has begun another one has to end by itself: its host may have vanished.
REPLACED_S = 5.0
ACK_PAUSE_S = 0.01


class Producers:
    """Takes the streams of all producers. options : how streams are decoded"""

    def __init__(self, sequencer: Sequencer, options: ReadOptions, limits: Limits) -> None:
        self._sequencer, self._options, self.budget = sequencer, options, Budget(limits)
        self._failed_event = FrequentEvent("put_failed")

    def put(self, context: flight.ServerCallContext, request: PutRequest, reader: Any, send: Send) -> None:
        """Read a stream to its end, and send acknowledgements up to the last one.

        send : sends a message to the producer; may block until the producer reads it
        Raises UsageError or InputError if the stream is invalid, ServiceError if the service ends or is full.
        """
        try:
            self._put(context, request, reader, send)
        except PenstockError as error:
            if not self._sequencer.is_closing:
                self._failed_event.report(contributor=request.contributor, peer=context.peer(), error=str(error))
            raise

    def _put(self, context: flight.ServerCallContext, request: PutRequest, reader: Any, send: Send) -> None:
        peer = context.peer()
        name = f"producer '{request.contributor}'" if request.contributor is not None else f"producer {peer}"
        with Acks(send) as acks:
            call = context.get_middleware(ADMISSION)
            stream = self._sequencer.open(request, acks.put, partial(call.end_within, REPLACED_S))
            report("producer_connected", contributor=stream.contributor, peer=peer, first=stream.next)
            try:
                self._apply_all(context, stream, reader, name, request)
                self._sequencer.check_not_failed()  # which would have ended the stream
                if self._sequencer.finish(stream):
                    acks.wait_for(stream.position)
                    if acks.last.position < stream.position:
                        raise ServiceError(
                            f"{name}: frames after {acks.last.position} are not committed; send them again"
                        )
            except ServiceError:
                # First acknowledge the last commit, so that the producer gets it before the error.
                if self._sequencer.is_closing:
                    self._sequencer.ended.wait()
                raise
            finally:
                self._sequencer.close(stream)
                report("producer_left", contributor=stream.contributor, peer=peer, **stream.counts())

    def _apply_all(
        self, context: flight.ServerCallContext, stream: Stream, reader: Any, name: str, request: PutRequest
    ) -> None:
        queue = Queue(self.budget, name)
        try:
            ends, call = request.ends, context.get_middleware(ADMISSION)
            idle_s = math.inf if request.kind == EXCHANGE else self.budget.limits.idle_s  # which also reads deltas
            call.silent_until_s = time.monotonic() + idle_s
            every = not ends and self._batches_are_frames(schema_of(reader, name))
            checked = _CheckedReader(context, call, idle_s, stream, reader, queue, every, ends)
            part = chunks_part(reader, name, checked.read_chunk, ends)
            frames = FrameReader(Source(name, lambda: (each for each in (part,))), self._options)
            frames.first_bad = self._sequencer.first_bad
            with closing(frames.numbered()) as numbered:
                for _, frame in numbered:
                    self._sequencer.wait_for_room(stream, context.is_cancelled)
                    self._sequencer.push(stream, frame)
                    queue.frame_applied()
        except InputError as error:
            self._sequencer.rejected(error)
            raise
        finally:
            queue.clear()

    def _batches_are_frames(self, schema: pa.Schema) -> bool:
        step, rows = self._options.columns.get("step", "step"), self._options.contribution_rows
        return rows == "batch" or (rows is None and step not in schema.names)


@dataclass
class _CheckedReader:
    """Reads a producer's stream, and checks batches before the frame reader gets them.

    call : the connection of which is closed if no message arrives for idle_s seconds
    every_batch : whether every batch ends its frame; marks_ends : whether metadata marks the ends of frames
    """

    context: flight.ServerCallContext
    call: AdmittedCall
    idle_s: float
    stream: Stream
    reader: Any
    queue: Queue
    every_batch: bool
    marks_ends: bool

    def read_chunk(self, columns: list[str]) -> Chunk:
        """Return the next batch, with the columns in use. Raises StopIteration at the end."""
        self.call.silent_until_s = time.monotonic() + self.idle_s
        try:
            chunk = self.reader.read_chunk()
        except StopIteration:
            self._check_end()
            raise
        finally:
            self.call.silent_until_s = None
        metadata = read_metadata(chunk.app_metadata)
        if metadata.number is not None and self.stream.contributor is not None and metadata.number != self.stream.next:
            raise InputError(
                f"frame {metadata.number} came where frame {self.stream.next} is next", source=self.queue.name
            )
        if chunk.data is None:
            return Chunk(None, metadata.ends, metadata.step)
        waits = chunk.data.num_rows > 0 and not metadata.ends and not self.every_batch
        return Chunk(self.queue.admit(chunk.data, columns, waits), metadata.ends, metadata.step)

    def _check_end(self) -> None:
        """Raise ServiceError if the connection broke, InputError if the stream ended inside a frame."""
        if self.queue.num_rows:
            time.sleep(BREAK_IS_REPORTED_AFTER_S)
        left = f"; {self.queue.num_rows} rows of an incomplete frame are dropped"
        if self.context.is_cancelled():
            if self.call.ends_at_s <= time.monotonic() and math.isfinite(self.idle_s):
                silence = f"no message came for {self.idle_s:g} s (--idle-timeout), or another stream has begun"
                raise ServiceError(f"{self.queue.name}: {silence}: its connection was closed")
            raise ServiceError(f"{self.queue.name}: the connection broke off{left if self.queue.num_rows else ''}")
        if self.marks_ends and self.queue.num_rows:
            raise InputError(f"the stream ended inside a frame{left}", source=self.queue.name)


class Acks:
    """Sends acknowledgements to a producer, on a dedicated thread, so that a slow producer delays no other.

    send : sends a message; of several queued acknowledgements, only the newest
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._changed = threading.Condition()  # for ``wait_for``
        # The thread waits for the first, and between two messages for the second: frames that come then wake nobody.
        self._wanted, self._over = threading.Event(), threading.Event()
        self._is_disconnected = False
        self.last = self._sent = Ack(0, False, 0)
        self._thread = threading.Thread(target=self._run, name="penstock-acks", daemon=True)

    def put(self, ack: Ack) -> None:
        self.last = ack
        if not self._wanted.is_set():
            self._wanted.set()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, position: int) -> None:
        """Wait until a position is acknowledged, the service ends, or the producer has disconnected."""
        with self._changed:
            self._changed.wait_for(lambda: self.last.position >= position or self.last.closing or self._is_disconnected)

    def __enter__(self) -> Acks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()  # first: what comes from here on sets it again
            is_over, ack = self._over.is_set(), self.last
            if ack is not self._sent:
                self._sent = ack
                try:
                    self._send(ack.encoded())
                except (pa.ArrowException, flight.FlightError, OSError):  # the producer has disconnected
                    with self._changed:
                        self._is_disconnected = True
                        self._changed.notify_all()
                    return
            if is_over:
                return
            # Many small frames share an acknowledgement: each message costs a thread switch on both sides.
            self._over.wait(ACK_PAUSE_S)
