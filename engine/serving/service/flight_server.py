"""The methods of Flight: each passes a call on to the producers, the readers or the engine, and converts its errors.

An error becomes one line for the caller, and the service continues.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight

from penstock.api.engine import Engine
from penstock.base.errors import MOST_LISTED, PenstockError, UsageError
from penstock.io.list_columns import list_type
from penstock.serving.flight.connection import Address
from penstock.serving.flight.messages import (
    DELTAS,
    EXCHANGE,
    GRADIENTS,
    LOOKUP,
    MAX_NAME,
    TABLE,
    PutRequest,
    as_flight,
    decoded,
    encoded,
    is_name,
    path_of,
)
from penstock.serving.service.auth import ADMISSION, CallAdmission, Certificates, Right
from penstock.serving.service.lookup_streams import LookupAnswers, request_schema
from penstock.serving.service.put_streams import Producers
from penstock.serving.service.sequencer import Sequencer, TagRequest
from penstock.serving.service.subscriptions import Answer, Readers

RIGHTS = {
    "status": Right.READ,
    "explain": Right.READ,
    "position": Right.PUT,
    "checkpoint": Right.PUT,  # the end of a put requests a commit, too
    "leave": Right.PUT,
}  # of other actions: to operate
ACTIONS = {
    "status": "what the service has done and holds, as JSON",
    "explain": "what the gate waits for, in one line",
    "position": 'how far a producer\'s frames have come, and how many are in the gate: {"contributor": NAME}',
    "checkpoint": "commit now; answers when it is on disk",
    "rollback": 'step forward to the rows of an earlier commit: {"to": TAG or STEP}; answers when it is on disk',
    "tag": 'commit, and give the commit a name: {"name": NAME, "step": STEP, "keep": N}; of the names that differ in '
    "their number, the N newest stay",
    "leave": 'a worker leaves, whose stream is not read: {"contributor": NAME, "stream": IDENTIFIER}',
    "drain": 'take no frames any more, commit, and end; {"wait": true} answers once that is on disk',
}


class Answering(Protocol):
    """What every server has to know of its service. lookups : answers those of one stream"""

    lookups: Callable[[], LookupAnswers]
    wants_to_end: threading.Event

    def status(self) -> dict[str, Any]: ...


class EngineService(Answering, Protocol):
    """What the server of an engine has to know in addition."""

    engine: Engine
    sequencer: Sequencer
    producers: Producers
    readers: Readers


class AnsweringServer(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server that answers errors in one line, actions and the lists of its actions and flights.

    actions : name → what it does
    """

    actions: Mapping[str, str]

    def __init__(self, service: Answering, address: Address, tls: Certificates, admission: CallAdmission) -> None:
        self._service = service
        super().__init__(address.uri, tls_certificates=tls, middleware={ADMISSION: admission})

    @contextmanager
    def _serving(self, context: Any, *rights: Right) -> Iterator[None]:
        """Serve an admitted call in the block. rights : that the caller's role needs"""
        with _answering():
            call = context.get_middleware(ADMISSION)
            call.set_peer(context.peer())
            for right in rights:
                call.check(right)
            yield

    def _act(self, kind: str, body: Any) -> dict[str, Any]:
        """Return the answer to an action. Raises UsageError for an unknown one."""
        raise NotImplementedError

    def _paths(self) -> Iterable[tuple[str, ...]]:
        """Return the paths of all flights."""
        raise NotImplementedError

    def _flight(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        """Return a flight that callers can get or put. Raises UsageError for an unknown one."""
        raise NotImplementedError

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        with self._serving(context, RIGHTS.get(action.type, Right.OPERATE)):
            body = action.body if action.body is not None and action.body.size else b"{}"
            return [json.dumps(self._act(action.type, body)).encode()]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        with self._serving(context):
            return list(self.actions.items())

    def list_flights(self, context: Any, criteria: Any) -> Iterator[flight.FlightInfo]:
        with self._serving(context):
            for path in self._paths():
                yield self._flight(flight.FlightDescriptor.for_path(*path))

    def get_flight_info(self, context: Any, descriptor: Any) -> flight.FlightInfo:
        with self._serving(context):
            return self._flight(descriptor)

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        try:
            with self._serving(context):
                return flight.SchemaResult(self._flight(descriptor).schema)
        except flight.FlightError as error:
            raise _SchemaError(str(error)) from None


class FlightServer(AnsweringServer):
    """The Flight server of a service. It listens once it is constructed."""

    actions = ACTIONS
    _service: EngineService

    # ---- gradients and deltas

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context, Right.PUT):
            request = PutRequest.of(descriptor)
            if request.kind != GRADIENTS:
                raise UsageError(f"put: expected {GRADIENTS}, got {request.kind}, which DoExchange takes")
            self._service.producers.put(context, request, reader, writer.write)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context, Right.READ):
            if path_of(descriptor) == [LOOKUP]:
                self._service.lookups().answer_all(reader, writer, context.get_middleware(ADMISSION))
                return
            context.get_middleware(ADMISSION).check(Right.PUT)
            request = PutRequest.of(descriptor)
            if request.kind != EXCHANGE:
                raise UsageError(f"exchange: expected {EXCHANGE}, got {request.kind}, which DoPut takes")
            self._exchange(context, request, reader, writer)

    def _exchange(self, context: Any, request: PutRequest, reader: Any, writer: Any) -> None:
        """Read gradients; write deltas, with acknowledgements as metadata between them."""
        since = self._service.readers.log.publish_all()
        writer.begin(self._service.readers.delta_schema)
        writing, over = threading.Lock(), threading.Event()

        def send(message: bytes) -> None:
            with writing:
                writer.write_metadata(message)

        def feed() -> None:
            """Write deltas until the producer's stream ends."""
            ticket = {DELTAS: {"since": str(since), "follow": True}}
            try:
                for batch, _ in self._service.readers.get(ticket, over.is_set).messages:
                    with writing:
                        writer.write_batch(batch)
            except (PenstockError, pa.ArrowException, flight.FlightError, OSError) as error:
                failed.append(error)

        failed: list[BaseException] = []
        feeding = threading.Thread(target=feed, name="penstock-exchange", daemon=True)
        feeding.start()
        try:
            self._service.producers.put(context, request, reader, send)
        finally:
            over.set()
            self._service.readers.log.wake_readers()
            feeding.join()
        if failed:
            raise failed[0]

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        with self._serving(context, Right.READ):
            answer = self._service.readers.get(decoded(ticket.ticket, "the ticket"), context.is_cancelled)
            return flight.GeneratorStream(answer.schema, answered(answer))

    # ---- actions

    def _act(self, kind: str, body: Any) -> dict[str, Any]:
        if kind == "status":
            return self._service.status()
        if kind == "explain":
            return self._explained()
        if kind == "position":
            return self._position(decoded(body, "position"))
        if kind == "checkpoint":
            self._service.sequencer.commit()
            return {"committed_step": self._service.sequencer.streams.durable_step}
        if kind == "rollback":
            done = self._service.sequencer.roll_back(decoded(body, "rollback").get("to"))
            return {"global_step": done.step, "to_step": done.target.step, "rolled_back": done.num_frames}
        if kind == "tag":
            return {"global_step": self._service.sequencer.tag(TagRequest.of(decoded(body, "tag")))}
        if kind == "leave":
            self._service.sequencer.leave(*_names(decoded(body, "leave"), "contributor", "stream"))
            return {}
        if kind == "drain":
            self._service.wants_to_end.set()
            return self._drained() if decoded(body, "drain").get("wait") else {"ending": True}
        raise UsageError(f"action '{kind}': expected one of {', '.join(ACTIONS)}")

    def _drained(self) -> dict[str, Any]:
        """Wait until the service has committed its end. Return what it leaves."""
        self._service.sequencer.ended.wait()
        error = self._service.sequencer.error
        return {"ending": True, "error": None if error is None else str(error), **self._service.status()}

    def _explained(self) -> dict[str, Any]:
        """Return what the gate waits for, the frames in it by producer, and known producers that have none in it."""
        with self._service.engine.gate.still():
            frames = self._service.engine.core.contributed()
            others = (name for name in self._service.sequencer.streams.producers if name not in frames)
            return {
                "gate": self._service.engine.gate.explain(),
                "frames": frames,
                "without_frame": list(islice(others, MOST_LISTED + 1)),
                "missing": self._service.sequencer.waits().missing,
            }

    def _position(self, request: dict[str, Any]) -> dict[str, Any]:
        name, process = request.get("contributor"), request.get("stream")
        if not isinstance(name, str):
            raise UsageError('position: expected {"contributor": NAME}')
        if request.get("claims") and not (is_name(name) and is_name(process)):
            raise UsageError(f'position: expected {{"contributor": NAME, "stream": ID}}, each of 1 to {MAX_NAME} bytes')
        with self._service.engine.gate.still():
            claim = self._service.sequencer.claim(name, process) if request.get("claims") and is_name(process) else None
            return {
                **({} if claim is None else {"claim": claim}),
                **self._service.sequencer.streams.counts(name, process),
                "in_gate": self._service.engine.core.contributed().get(name, 0),
                "position": self._service.sequencer.streams.position(name),
                "durable_position": self._service.sequencer.streams.durable_position(name),
                "durable": self._service.sequencer.streams.is_durable,
                "in_rounds": self._service.engine.core.turns is not None,
                "missing": self._service.sequencer.waits().missing,
            }

    # ---- flights

    def _paths(self) -> Iterable[tuple[str, ...]]:
        return ((GRADIENTS,), (LOOKUP,), (DELTAS,), *((TABLE, name) for name in self._service.engine.core.tables.specs))

    def _flight(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        path = path_of(descriptor)
        if path is None or path[0] in (GRADIENTS, EXCHANGE):
            PutRequest.of(descriptor)
            return flight.FlightInfo(self._gradient_schema(), descriptor, [], -1, -1)
        if path == [LOOKUP]:
            dims = {name: spec.dim for name, spec in self._service.engine.core.tables.specs.items()}
            return flight.FlightInfo(request_schema(dims), descriptor, [], -1, -1)
        if path == [DELTAS]:
            ticket: dict[str, Any] = {DELTAS: {}}
            schema, rows = self._service.readers.delta_schema, -1
        elif len(path) == 2 and path[0] == TABLE:
            ticket, schema = {TABLE: path[1]}, self._service.readers.snapshots.schema(path[1])
            rows = self._service.readers.snapshots.num_rows(path[1])
        else:
            raise UsageError(f"no flight {'/'.join(path)}: expected {GRADIENTS}, {LOOKUP}, {DELTAS} or {TABLE}/NAME")
        return flight.FlightInfo(schema, descriptor, [flight.FlightEndpoint(encoded(ticket), [])], rows, -1)

    def _gradient_schema(self) -> pa.Schema:
        """Return the schema of the simplest row stream that the service takes."""
        specs = self._service.engine.core.tables.specs
        gradient = list_type(spec.dim for spec in specs.values())
        unsigned = any(spec.id_type == "uint64" for spec in specs.values())
        fields = [("id", pa.uint64() if unsigned else pa.int64()), ("gradient", gradient)]
        fields += [("time", pa.int64())] if self._service.engine.config.needs_time else []
        return pa.schema([("table", pa.utf8()), *fields] if len(specs) > 1 else fields)


def _names(request: dict[str, Any], *fields: str) -> tuple[str, ...]:
    """Return texts of a request. Raises UsageError."""
    values = tuple(value for field in fields if isinstance(value := request.get(field), str))
    if len(values) < len(fields):
        raise UsageError(f"expected the texts {', '.join(fields)}")
    return values


class _SchemaError(ValueError):
    """The error of ``get_schema``: INVALID_ARGUMENT for the caller, in one line.

    pyarrow converts Flight errors of every method but this one, whose caller gets the lines of
    ``traceback.format_exception``. If that fails, the caller gets the name of the class instead.
    """

    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise AttributeError("this error is not formatted")


@contextmanager
def _answering() -> Iterator[None]:
    """Convert errors in the block to Flight errors: one line for the caller."""
    try:
        yield
    except Exception as error:
        raise as_flight(error) from None


def answered(answer: Answer) -> Iterator[tuple[pa.RecordBatch, bytes] | flight.FlightDataStream]:
    """Yield the messages of an answer, as ``GeneratorStream`` takes them."""
    has_dictionary = any(pa.types.is_dictionary(field.type) for field in answer.schema)
    with _answering():
        for batch, metadata in answer.messages:
            # pyarrow sends a generator's batch without its dictionaries, and a stream's with them.
            whole = flight.RecordBatchStream(pa.Table.from_batches([batch], answer.schema))
            yield whole if has_dictionary else (batch, metadata)
