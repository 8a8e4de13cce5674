"""The Flight service: an engine, its intake, its readers, and the methods of Flight.

The methods only delegate. An error becomes one line for the caller, and the service continues.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from penstock.checkpoint.store import Folder
from penstock.errors import PenstockError, UsageError
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.flight.connection import Address
from penstock.io.flight.messages import (
    DELTAS,
    EXCHANGE,
    GRADIENTS,
    TABLE,
    PutRequest,
    as_flight,
    decoded,
    encoded,
    path_of,
)
from penstock.io.storage.descriptors import reserve
from penstock.learning_rates import LearningRates
from penstock.service.auth import Doorkeeper
from penstock.service.connections import Connections
from penstock.service.delta_log import DeltaLog
from penstock.service.limits import Limits
from penstock.service.put_streams import Producers
from penstock.service.sequencer import Intake
from penstock.service.subscriptions import Answer, Readers

if TYPE_CHECKING:
    from penstock.engine import Engine

ACTIONS = {
    "status": "what the service has done and holds, as JSON",
    "explain": "what the gate waits for, in one line",
    "position": 'how far a producer\'s frames have come: {"contributor": NAME}',
    "checkpoint": "commit now; answers when it is on disk",
    "drain": "take no frames any more, commit, and end",
}


DOOR = "door"
# At the end: how long connections without a call have to answer gRPC, which would wait 20 s for one that does not; and
# for how long, and how often, the remaining ones are shut down.
LEAVE_S, CUT_S, CUT_EVERY_S = 1.0, 10.0, 0.05


@dataclass(frozen=True)
class Saving:
    """The checkpoint. every : steps between two commits; resume : whether the engine was restored from ``folder``"""

    folder: Folder
    every: int | None = None
    resume: bool = False


class Service:
    """An engine that producers push to and readers follow. It listens once it is constructed.

    address : to listen at; port 0 selects a free port
    tls : certificate and key
    tokens : each of them admits a caller; none: every caller is admitted
    reading : how streams of gradients are decoded
    per_steps : steps per delta; None: one delta per commit, or per step without a checkpoint

    wants_to_end : set when a caller requests the end or the service cannot continue; then call ``end`` and ``close``
    Raises OSError if it cannot listen at the address.
    """

    def __init__(
        self,
        engine: Engine,
        address: Address,
        reading: ReadOptions,
        rates: LearningRates,
        *,
        saving: Saving | None = None,
        limits: Limits | None = None,
        tls: list[tuple[bytes, bytes]] | None = None,
        tokens: tuple[bytes, ...] = (),
        per_steps: int | None = None,
    ) -> None:
        limits = limits or Limits()
        self.engine, self.limits = engine, limits
        self.wants_to_end = threading.Event()
        self.log = DeltaLog(engine, per_steps, limits.delta_bytes, durable=saving is not None)
        where = (saving.folder, saving.every, saving.resume) if saving is not None else (None, None, False)
        self.intake = Intake(engine, rates, self.log, limits.producers, self.wants_to_end.set, *where)
        self.producers = Producers(self.intake, reading, limits)
        self.readers = Readers(engine, self.intake, self.log, limits)
        self.connections = Connections(limits)
        self.door = Doorkeeper(tokens, limits.calls, self.connections)
        self._started_s = time.monotonic()
        self._watched = ExitStack()
        self._watched.enter_context(engine.watch.run(self.intake.counters, lambda: None, self.intake.first_bad))
        engine.watch.queued_rows = lambda: self.producers.rows.num_taken
        try:
            with _listening(address):
                self._front = _Front(self, address, tls or [])
        except BaseException:
            self.intake.end()
            self._watched.close()
            self.connections.close()
            raise
        self.address = Address(address.host, self._front.port, address.tls)
        self.connections.watch(self._front.port)

    def end(self) -> None:
        """Take no more frames, commit, and notify all streams. Raises the error of the last commit."""
        try:
            self.intake.end()
            if self.intake.error is not None:
                raise self.intake.error
        finally:
            self._watched.close()

    def close(self, grace_s: float) -> bool:
        """Wait for calls to complete, shut down the other connections, and stop listening. Call it after ``end``.

        grace_s : how long to wait for calls
        Returns whether that succeeded. Otherwise gRPC still serves a call, which only the end of the process ends.
        """
        has_left = self.door.wait_until_empty(grace_s)
        leaving = threading.Thread(target=self._front.shutdown, name="penstock-shutdown", daemon=True)
        leaving.start()
        if has_left:  # the last answers may still be in flight
            leaving.join(LEAVE_S)
        until_s = time.monotonic() + CUT_S
        while leaving.is_alive() and time.monotonic() < until_s:
            self.connections.cut()
            leaving.join(CUT_EVERY_S)
        self.connections.close()
        return not leaving.is_alive()

    def status(self) -> dict[str, Any]:
        """Return the status as plain data, for JSON."""
        intake, log, counters = self.intake, self.log, self.intake.counters
        with self.engine.gate.still():
            return {
                "global_step": self.engine.global_step,
                "committed_step": intake.durable_step if intake.is_durable else None,
                "deltas": {"from_step": log.first_step, "to_step": log.step, "bytes": log.num_bytes},
                "lineage": intake.lineage,
                "rows": counters.rows,
                "frames": counters.frames,
                "stale": counters.stale,
                "steps": counters.steps,
                "pending": self.engine.gate.num_accumulated,
                "dropped": dict(counters.dropped),
                "producers": intake.num_producers,
                "streams": intake.num_streams,
                "queued_rows": self.producers.rows.num_taken,
                "queued_bytes": self.producers.held.num_taken,
                "shared_memory": {"bytes": self.producers.memory.num_taken, "batches": self.producers.num_shared},
                "connections": self.connections.num_open,
                "calls": self.door.num_calls,
                "refused": self.door.num_refused,
                "seconds": time.monotonic() - self._started_s,
            }

    # ---- called by the Flight methods

    def exchange(self, context: flight.ServerCallContext, request: PutRequest, reader: Any, writer: Any) -> None:
        """Read gradients; write deltas, with acknowledgements as metadata between them."""
        with self.engine.gate.still():
            self.log.tell_all()
            since = max(self.log.step, self.log.first_step)
        writer.begin(self.readers.delta_schema)
        writing, over = threading.Lock(), threading.Event()

        def tell(said: Mapping[str, Any]) -> None:
            with writing:
                writer.write_metadata(encoded(said))

        def feed() -> None:
            """Write deltas until the producer's stream ends."""
            ticket = {DELTAS: {"since": since, "follow": True}}
            try:
                reserve.open(self.engine.core.tables.prepare_thread)
                for batch, _ in self.readers.get(ticket, over.is_set).messages:
                    with writing:
                        writer.write_batch(batch)
            except (PenstockError, pa.ArrowException, flight.FlightError, OSError) as error:
                failed.append(error)

        failed: list[BaseException] = []
        feeding = threading.Thread(target=feed, name="penstock-exchange", daemon=True)
        feeding.start()
        try:
            self.producers.put(context, request, reader, tell)
        finally:
            over.set()
            self.log.look_again()
            feeding.join()
        if failed:
            raise failed[0]

    def act(self, kind: str, body: Any) -> dict[str, Any]:
        """Return the answer to an action. Raises UsageError for an unknown action."""
        if kind == "status":
            return self.status()
        if kind == "explain":
            return {"gate": self.engine.gate.explain()}
        if kind == "position":
            return self._position(decoded(body, "position"))
        if kind == "checkpoint":
            self.intake.commit()
            return {"committed_step": self.intake.durable_step}
        if kind == "drain":
            self.wants_to_end.set()
            return {"ending": True}
        raise UsageError(f"action '{kind}': expected one of {', '.join(ACTIONS)}")

    def _position(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked.get("contributor")
        if not isinstance(name, str):
            raise UsageError('position: expected {"contributor": NAME}')
        with self.engine.gate.still():
            return {
                "position": self.intake.position(name),
                "durable_position": self.intake.durable_position(name),
                "durable": self.intake.is_durable,
            }

    def flights(self) -> Iterator[flight.FlightInfo]:
        """Yield the flights that callers can get or put."""
        for path in ((GRADIENTS,), (DELTAS,), *((TABLE, name) for name in self.engine.core.tables.specs)):
            yield self.flight(flight.FlightDescriptor.for_path(*path))

    def flight(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        """Return one flight. Raises UsageError for an unknown one."""
        path = path_of(descriptor)
        if path is None or path[0] in (GRADIENTS, EXCHANGE):
            PutRequest.of(descriptor)
            return flight.FlightInfo(self._gradient_schema(), descriptor, [], -1, -1)
        if path == [DELTAS]:
            ticket: dict[str, Any] = {DELTAS: {}}
            schema, rows = self.readers.delta_schema, -1
        elif len(path) == 2 and path[0] == TABLE:
            ticket, schema = {TABLE: path[1]}, self.readers.table_schema(path[1])
            rows = self.engine.core.tables.specs[path[1]].vocabulary_size
        else:
            raise UsageError(f"no flight {'/'.join(path)}: expected {GRADIENTS}, {DELTAS} or {TABLE}/NAME")
        return flight.FlightInfo(schema, descriptor, [flight.FlightEndpoint(encoded(ticket), [])], rows, -1)

    def _gradient_schema(self) -> pa.Schema:
        """Return the schema of the simplest row stream that the service takes."""
        dims = {spec.dim for spec in self.engine.core.tables.specs.values()}
        gradient = pa.list_(pa.float32(), *dims) if len(dims) == 1 else pa.list_(pa.float32())
        fields = [("id", pa.int64()), ("gradient", gradient)]
        return pa.schema([("table", pa.utf8()), *fields] if len(self.engine.core.tables.specs) > 1 else fields)


@contextmanager
def _answering() -> Iterator[None]:
    """Convert errors in the block to Flight errors: one line for the caller."""
    try:
        yield
    except Exception as error:
        raise as_flight(error) from None


@contextmanager
def _listening(address: Address) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, flight.FlightError, OSError) as error:
        raise OSError(f"cannot listen at {address.uri}: {' '.join(str(error).split())[:200]}; is it taken?") from error


class _Front(flight.FlightServerBase):  # type: ignore[misc]
    """The methods of Flight."""

    def __init__(self, service: Service, address: Address, tls: list[tuple[bytes, bytes]]) -> None:
        super().__init__(address.uri, tls_certificates=tls, middleware={DOOR: service.door})
        self._service = service

    @contextmanager
    def _serving(self, context: Any) -> Iterator[None]:
        """Serve an admitted call in the block, on a thread that may be new."""
        with _answering():
            context.get_middleware(DOOR).comes_from(context.peer())
            reserve.open(self._service.engine.core.tables.prepare_thread)
            yield

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context):
            request = PutRequest.of(descriptor)
            if request.kind != GRADIENTS:
                raise UsageError(f"put: expected {GRADIENTS}, got {request.kind}, which DoExchange takes")
            self._service.producers.put(context, request, reader, lambda said: writer.write(encoded(said)))

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context):
            request = PutRequest.of(descriptor)
            if request.kind != EXCHANGE:
                raise UsageError(f"exchange: expected {EXCHANGE}, got {request.kind}, which DoPut takes")
            self._service.exchange(context, request, reader, writer)

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        with self._serving(context):
            answer = self._service.readers.get(decoded(ticket.ticket, "the ticket"), context.is_cancelled)
            return flight.GeneratorStream(answer.schema, _answered(answer))

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        with self._serving(context):
            body = action.body if action.body is not None and action.body.size else b"{}"
            return [json.dumps(self._service.act(action.type, body)).encode()]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        with self._serving(context):
            return list(ACTIONS.items())

    def list_flights(self, context: Any, criteria: Any) -> Iterator[flight.FlightInfo]:
        with self._serving(context):
            yield from self._service.flights()

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        with self._serving(context):
            return self._service.flight(descriptor)

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        with self._serving(context):
            return flight.SchemaResult(self._service.flight(descriptor).schema)


def _answered(answer: Answer) -> Iterator[tuple[pa.RecordBatch, bytes] | flight.FlightDataStream]:
    has_dictionary = any(pa.types.is_dictionary(field.type) for field in answer.schema)
    with _answering():
        for batch, said in answer.messages:
            # pyarrow sends a generator's batch without its dictionaries, and a stream's with them.
            whole = flight.RecordBatchStream(pa.Table.from_batches([batch], answer.schema))
            yield whole if has_dictionary else (batch, said)
