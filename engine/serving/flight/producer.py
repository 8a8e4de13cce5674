"""Send one producer's frames to a service: numbered, buffered until acknowledged, and sent again after a failure."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from penstock.base.errors import PenstockError, ServiceError, StateError, UsageError, listed
from penstock.base.events import report
from penstock.base.validation import whole
from penstock.io.patience import Patience
from penstock.io.sources.batch import data_bytes
from penstock.serving.flight.connection import Connection
from penstock.serving.flight.messages import END, FRAME, STEP, Ack, PutRequest, decoded, encoded
from penstock.serving.flight.put_frames import Frame, batches_of, copied, split_batch, with_schema

# The size of the buffer of unacknowledged frames.
WINDOW_BYTES = 256 << 20
# After so long without an expected acknowledgement, the producer requests a commit.
COMMIT_AFTER_S = 0.2
LOG_EVERY_S = 60.0
# How long the end of a stream waits for a service that does not answer.
GRACE_S = 2.0


class _Numbered(NamedTuple):
    """A frame and its number, split into messages. step : of a frame without rows"""

    number: int
    pieces: list[pa.RecordBatch]
    num_bytes: int
    step: int | None


class Producer:
    """Sends frames under a name. A context manager: leaving it waits until everything is acknowledged.

    Parameters
    ----------
    connection : Connection
        The client's.
    contributor : str
        The producer's name.
    first : int or None
        The number of the first frame, from 1; None: the one after the durable frames.
    window_bytes : int
        Bytes of frames kept until they are acknowledged.

    Attributes
    ----------
    last : int
        The number of the last frame that ``send`` took.
    num_in_gate : int
        Its frames in the gate, which has not opened with them yet, at the last ``poll``.
    acked : Ack
        The last acknowledgement; ``applied``, ``stale`` and ``dropped`` count what this producer sent, also over broken
        connections and restarts of the service.
    """

    def __init__(self, connection: Connection, contributor: str, first: int | None, window_bytes: int) -> None:
        self._connection, self._contributor, self._window_bytes = connection, contributor, window_bytes
        self._process = secrets.token_hex(8)  # identifies this one, which may need several connections
        self._patience = Patience(connection.patience_s)
        self._buffer: dict[int, _Numbered] = {}  # by number, ascending
        self._buffered_bytes = 0
        self._stream: _PutStream | None = None
        self._schema: pa.Schema | None = None
        self.acked = Ack(0, False, 0)
        self.num_in_gate = 0
        # From here on, the service takes no frame of an earlier process of this name, so that the position stays.
        answer = connection.act("position", contributor=contributor, stream=self._process, claims=True)
        self._claim = answer.get("claim")
        self._is_worker = bool(answer.get("in_rounds"))
        self._waits_since_s: float | None = None
        self._said_s = 0.0
        self.last = int(answer["durable_position"])
        if first is not None:
            self.begin_at(first)

    def begin_at(self, first: int) -> None:
        """Number the next frame, of a producer that has sent none.

        Parameters
        ----------
        first : int
            The number, from 1.

        Raises
        ------
        UsageError
            If the service has no durable frame before it.
        """
        position = int(self._connection.act("position", contributor=self._contributor)["durable_position"])
        if not 1 <= first <= position + 1:
            raise UsageError(
                f"first: the service holds {position} frames of '{self._contributor}': {first} is not among "
                "them or next"
            )
        self.last = first - 1

    def send(self, frame: Frame, step: int | None = None) -> int:
        """Send a frame. Waits if the buffer is full.

        Parameters
        ----------
        frame : pyarrow.RecordBatch, table or list of them
            As for ``Client.put``; with ``step`` it may have no rows.
        step : int or None
            The step of a frame without rows, with which a worker has its turn in a round (docs/explanation/gates.md).

        Returns
        -------
        int
            The number of the frame.

        Raises
        ------
        InputError
            If the service rejects a frame.
        ServiceError
            If the service stays unreachable.
        """
        step = None if step is None else whole("step", step, 0)
        batches = batches_of(frame, is_empty=step is not None)
        self._schema = self._schema or batches[0].schema
        batches = list(map(copied, with_schema(batches, self._schema)))
        pieces = batches[:1] if step is not None else [piece for batch in batches for piece in split_batch(batch)]
        size = sum(map(data_bytes, batches))
        self._waits_since_s = None  # an interrupt may have ended the wait before
        while not self._is_done() and self._buffered_bytes + size > self._window_bytes:
            self._send_buffer()
            self._wait_for_ack(commits=True)
        self.last += 1
        self._buffer[self.last] = _Numbered(self.last, pieces, size, step)
        self._buffered_bytes += size
        self._send_buffer()
        return self.last

    def wait(self) -> Ack:
        """Wait until everything that was sent is durable.

        Returns
        -------
        Ack
            The last acknowledgement.
        """
        self._waits_since_s = None
        while not self._is_done():
            self._send_buffer()
            self._wait_for_ack(commits=True)
        return self.acked

    def poll(self) -> Ack:
        """Return what the service has applied so far, durable or not; send frames again that it lost in a restart.

        Returns
        -------
        Ack
            Not durable; ``acked`` is the last acknowledgement.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from penstock.io.flight import connect
        >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     with service.producer("worker-0") as producer:
        ...         number = producer.send(frame)
        ...         while producer.poll().position < number:
        ...             pass
        ...         producer.poll().applied
        1
        """
        if not self._is_done():
            self._send_buffer()
        now = self._connection.act("position", contributor=self._contributor, stream=self._process)
        self.num_in_gate = now["in_gate"]
        return Ack(now["position"], False, now["step"], False, now["applied"], now["stale"], now["pending"])

    def close(self) -> None:
        """Wait for the last acknowledgement, and end."""
        self._waits_since_s = None
        try:
            while not self._is_done():
                self._send_buffer().end()  # which also requests a commit
                self._wait_for_ack(commits=False)
        finally:
            self._drop()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # what was sent before an error is written, and an interrupt waits for nothing
            self._drop(drops=not issubclass(kind, Exception))

    # ---- inside

    def _is_done(self) -> bool:
        """Return whether everything that was sent is acknowledged."""
        if self._stream is not None:
            self._release(self._stream)
        return not self._buffer

    def _send_buffer(self) -> _PutStream:
        """Send all buffered frames, over a new connection if the old one broke."""
        self._connection.check_process()
        while True:
            try:
                stream = self._stream = self._stream or self._begin()
                for number in range(stream.next, self.last + 1):
                    stream.send(self._buffer[number])
                stream.check()
                self._release(stream)
                return stream
            except ServiceError as error:  # no new stream can begin
                raise self._patience.explained(error) from None
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                self._drop()
                self._patience.wait(self._connection.passing(error))
            except BaseException:  # an interrupt inside a frame, which begins again in another stream
                self._drop()
                raise

    def _say_who_is_missing(self) -> None:
        """Log each minute for which workers this one waits, if it does."""
        now_s = time.monotonic()
        assert self._waits_since_s is not None
        if now_s - self._said_s < LOG_EVERY_S:
            return
        self._said_s = now_s
        now = self._connection.act("position", contributor=self._contributor)  # says if the service does not answer
        if missing := now.get("missing"):  # an earlier service does not say it
            turn = f"frame {now['position']} of '{self._contributor}'"  # its last one that the service has read
            waits_for = f"{turn} to have its turn; missing: {listed(missing)}"
            seconds = round(now_s - self._waits_since_s)
            report("waiting", service=self._connection.uri, seconds=seconds, waits_for=waits_for)

    def _wait_for_ack(self, commits: bool) -> None:
        """Wait for an acknowledgement or the end of the stream. commits : request a commit if none arrives"""
        stream = self._stream
        assert stream is not None
        if self._waits_since_s is None:
            self._waits_since_s = self._said_s = time.monotonic()
        timeout_s = COMMIT_AFTER_S if commits else LOG_EVERY_S
        if stream.wait_beyond(self.acked.position, timeout_s):
            self._release(stream)
            self._waits_since_s = None
            return
        if commits and stream.acked is not None and stream.acked.durable:
            self._connection.act("checkpoint")
        self._say_who_is_missing()

    def _position(self) -> int:
        return int(self._connection.act("position", contributor=self._contributor)["position"])

    def _begin(self) -> _PutStream:
        """Open a new stream, from the first frame that the service has not applied."""
        position = self._position()
        first = next(iter(self._buffer), self.last + 1)
        if position < first - 1:
            raise StateError(
                f"producer '{self._contributor}': the service has {position} frames of the {first - 1} that it "
                "acknowledged: it was restarted without its checkpoint, or with an older one"
            )
        client, options = self._connection.opened()
        request = PutRequest(
            contributor=self._contributor, first=position + 1, ends=True, process=self._process, claim=self._claim
        )
        assert self._schema is not None
        return _PutStream(client, options, request, self._schema)

    def _release(self, stream: _PutStream) -> None:
        """Drop acknowledged frames from the buffer."""
        if stream.acked is None:
            return
        if stream.acked.position > self.acked.position:
            self._patience.good()
        self.acked = stream.acked
        while self._buffer and (number := next(iter(self._buffer))) <= self.acked.position:
            self._buffered_bytes -= self._buffer.pop(number).num_bytes

    def _drop(self, drops: bool = True) -> None:
        """End the stream. drops : without the frames that are not written yet"""
        if self._connection.is_forked:
            return
        stream, self._stream = self._stream, None
        if stream is not None:
            if (
                self._is_worker and self._buffer
            ):  # a service that reads no further does not notice the end of the stream
                with suppress(PenstockError):
                    self._connection.act_once("leave", GRACE_S, contributor=self._contributor, stream=self._process)
            stream.close(drops)
            self._release(stream)  # its last message may have arrived while it was closed


class _PutStream:
    """One DoPut: frames out, acknowledgements in, each on a separate thread.

    A write takes as long as the service reads no further, such as while workers are missing or it is stopped. As it is
    on a thread, a signal ends a wait in the calling one.

    next : the number of the next frame
    """

    def __init__(
        self,
        client: flight.FlightClient,
        options: flight.FlightCallOptions,
        request: PutRequest,
        schema: pa.Schema,
    ) -> None:
        assert request.first is not None
        self._writer, self._reader = client.do_put(request.descriptor(), schema, options)
        self.next, self._name = request.first, request.contributor
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._over = self._ended = False
        self._error: BaseException | None = None  # of the thread that writes
        self.acked: Ack | None = None
        self._unwritten = SimpleQueue[_Numbered | None]()
        targets = {"penstock-acks": self._listen, "penstock-frames": self._write_all}
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in targets.items()]
        for thread in self._threads:
            thread.start()

    def send(self, frame: _Numbered) -> None:
        """Send the next frame. Raises FlightError or ArrowException if the stream has ended."""
        self.check()
        self._unwritten.put(frame)
        self.next = frame.number + 1

    def _write_all(self) -> None:
        try:
            while (frame := self._unwritten.get()) is not None and self._write(frame):
                pass
            self._end()
        except BaseException as error:
            self._fail(error)

    def _write(self, frame: _Numbered) -> bool:
        """Write a frame, if the stream has not ended."""
        *before, last = frame.pieces
        with self._writing:
            if not self._ended:
                for piece in before:
                    self._writer.write_batch(piece)
                metadata = {END: True, FRAME: frame.number, **({} if frame.step is None else {STEP: frame.step})}
                self._writer.write_with_metadata(last, encoded(metadata))
            return not self._ended

    def end(self, drops: bool = False) -> None:
        """Close the sending side after the last frame. drops : before those that are not written yet"""
        while drops:
            try:
                self._unwritten.get_nowait()
            except Empty:
                break
        self._unwritten.put(None)

    def _end(self) -> None:
        with self._writing:
            if not self._ended:
                self._ended = True
                self._writer.done_writing()

    def _fail(self, error: BaseException) -> None:
        """Keep an error of the thread that writes, which ``check`` raises, and end the stream."""
        with suppress(flight.FlightError, pa.ArrowException, OSError):
            self._end()
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _note_end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._unwritten.put(None)

    def wait_beyond(self, position: int, timeout_s: float) -> bool:
        """Wait until more is acknowledged or the stream ends. Return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over or (self.acked is not None and self.acked.position > position), timeout_s
            )

    @property
    def _is_over(self) -> bool:
        return self._over or self._error is not None or (self.acked is not None and self.acked.closing)

    def check(self) -> None:
        """Raise the error that ended the stream, if any."""
        if self._error is not None:
            raise self._error
        if self._is_over:
            with self._writing:  # gRPC aborts the process if the listener ends a closed stream
                self._ended = True
            self._writer.close()
            raise flight.FlightUnavailableError(f"the service ended the stream of producer '{self._name}'")

    def close(self, drops: bool = True) -> None:
        """Close the stream. drops : frames that are not written yet"""
        # Its errors are the reason for closing it. The service drops a frame that was truncated here.
        with suppress(flight.FlightError, pa.ArrowException, OSError):
            self.end(drops)
        for thread in self._threads:  # the writer's end waits for the reader
            thread.join(GRACE_S)
            if thread.is_alive():  # the service has stopped to answer
                return
        with suppress(flight.FlightError, pa.ArrowException, OSError):
            self._writer.close()

    def _listen(self) -> None:
        try:
            while (message := self._reader.read()) is not None:
                fields = decoded(message, "an acknowledgement")
                with self._changed:
                    self.acked = Ack.of(fields) if "ack" in fields else self.acked
                    self._changed.notify_all()
                if self.acked is not None and self.acked.closing:
                    self.end(drops=True)  # the service waits for this, and the sending thread may be busy
        except (flight.FlightError, pa.ArrowException, OSError):
            pass  # the writer raises the error
        self._note_end()
