"""The messages between the Flight service and its client, other than Arrow batches: JSON, and errors with their class.

Both sides use this module. It opens nothing, and depends neither on the engine nor on a connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa
import pyarrow.flight as flight

import penstock.base.interrupts as interrupts
from penstock.base.errors import (
    ConfigError,
    DeltasGoneError,
    InputError,
    PenstockError,
    ReadTimeoutError,
    ServiceError,
    StateError,
    UsageError,
)
from penstock.io.sources.batch import checked_step

END, STEP = "penstock.end", "penstock.step"
FRAME = "penstock.frame"
GRADIENTS, EXCHANGE, DELTAS, TABLE, LOOKUP = "gradients", "exchange", "deltas", "table", "lookup"
# In a ticket of deltas or of a table: how rows are stored (model/row_encodings.py), if not as float32.
ROWS = "rows"
# In the metadata of the schemas of lookups: the dim of every table, as JSON.
DIMS = b"penstock.dims"

# In the metadata of the schema of deltas: the version that they begin at, and one of their epoch.
START, VERSION = b"penstock.start", b"penstock.version"

MAX_NAME = 256

# The maximum size of JSON: in a batch's metadata, and in a ticket, command or action. Longer text is not read.
MAX_METADATA_BYTES, MAX_MESSAGE_BYTES = 4096, 2 << 20

# The maximum size of an error's text. gRPC sends it twice in headers of 8 kB, where a byte may take three.
MAX_ERROR_BYTES = 1500

# RecursionError: brackets nested too deep.
_NO_JSON = (ValueError, RecursionError)

# The name of an error's class is sent along, so that both sides raise the same.
_KINDS: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (UsageError, InputError, ConfigError, DeltasGoneError, StateError, ReadTimeoutError)
}


@dataclass(frozen=True)
class PutRequest:
    """The descriptor of a stream of gradients.

    kind : "gradients" (acknowledged) or "exchange" (also answered with deltas)
    contributor : the producer's name, for its frame numbers; None: no numbers, so the stream cannot be resumed
    first : the number of the stream's first frame, counted from 1
    process : identifies the producer's, as "stream" in JSON; a request with that of the contributor's last stream
        continues its counts
    claim : the number of the claim of that process; None: none was made
    ends : whether metadata marks the ends of frames, so that a frame may have several batches; else, without steps,
        each batch is a frame
    """

    kind: str = GRADIENTS
    contributor: str | None = None
    first: int | None = None
    ends: bool = False
    process: str | None = None
    claim: int | None = None

    def descriptor(self) -> flight.FlightDescriptor:
        arguments = {
            "contributor": self.contributor,
            "first": self.first,
            "ends": self.ends,
            "stream": self.process,
            "claim": self.claim,
        }
        return flight.FlightDescriptor.for_command(encoded({self.kind: arguments}))

    @classmethod
    def of(cls, descriptor: flight.FlightDescriptor) -> PutRequest:
        """Parse a command, or a path: ("gradients",) or ("gradients", contributor)."""
        path = path_of(descriptor)
        if path is not None:
            if path[0] in (GRADIENTS, EXCHANGE) and (len(path) == 1 or (len(path) == 2 and is_name(path[1]))):
                return cls(path[0], path[1] if len(path) == 2 else None)
            raise UsageError(f"path {'/'.join(path)}: expected gradients, gradients/NAME or exchange/NAME")
        command = decoded(descriptor.command, "the descriptor's command")
        kind = next((k for k in (GRADIENTS, EXCHANGE) if k in command), None)
        if kind is None or not isinstance(command[kind], dict):
            got = encoded(command)[:100]
            raise UsageError(f'the descriptor\'s command: expected {{"gradients": {{…}}}}, got {got!r}')
        contributor, first, process = (command[kind].get(key) for key in ("contributor", "first", "stream"))
        for key, name in (("contributor", contributor), ("stream", process)):
            if name is not None and not is_name(name):
                raise UsageError(f"{key}: expected a name of 1 to {MAX_NAME} bytes, got {str(name)[:50]!r}")
        claim = command[kind].get("claim")
        if claim is not None and (type(claim) is not int or not 0 <= claim < 2**63):
            raise UsageError(f"claim: expected the number that the service gave, got {claim!r}")
        if first is not None and (type(first) is not int or first < 1):
            raise UsageError(f"first: expected the number of a frame, counted from 1, got {first!r}")
        return cls(kind, contributor, first, bool(command[kind].get("ends", False)), process, claim)


@dataclass(frozen=True)
class Ack:
    """An acknowledgement: the position of a producer, and the counts of this stream.

    Attributes
    ----------
    position : int
        Number of its frames that are acknowledged. All counts refer to the frames up to it.
    durable : bool
        Whether a commit on disk contains them; else they are in memory, in a service without a checkpoint.
    step : int
        The global step of that commit, or the current one.
    closing : bool
        The service is about to end: send no more.
    applied, stale : int
        Frames of this stream that entered the gate, and that were dropped because their step was behind; a frame that
        the service recognizes by its number counts as neither.
    pending : int
        Frames in the gate, of all producers.
    dropped : mapping of str to int
        Reason → rows of this stream's frames.
    """

    position: int
    durable: bool
    step: int
    closing: bool = False
    applied: int = 0
    stale: int = 0
    pending: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def encoded(self) -> bytes:
        return encoded({"ack": vars(self)})

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Ack:
        """Parse an acknowledgement; unknown keys are ignored.

        Parameters
        ----------
        message : mapping
            What the service sent.

        Returns
        -------
        Ack
        """
        return cls(**{key: value for key, value in message["ack"].items() if key in cls.__dataclass_fields__})


class FrameMetadata(NamedTuple):
    """The metadata that a producer sends with a batch.

    ends : whether it ends its frame; number : of that frame, if given; step : of that frame, if it has no rows
    """

    ends: bool = False
    number: int | None = None
    step: int | None = None


def is_name(name: Any) -> TypeGuard[str]:
    """Return whether a name is valid: checkpoints store it, so it must be short and encodable as UTF-8."""
    try:
        return isinstance(name, str) and 1 <= len(name.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def read_metadata(metadata: Any) -> FrameMetadata:
    """Parse metadata: the text ``penstock.end`` or JSON; ignore the metadata of other programs. Raises InputError."""
    text = b"" if metadata is None else memoryview(metadata).tobytes()
    if text == END.encode():
        return FrameMetadata(True)
    try:
        fields = json.loads(text) if text.startswith(b"{") and len(text) <= MAX_METADATA_BYTES else {}
    except _NO_JSON:
        fields = {}
    number = fields.get(FRAME)
    step = None if fields.get(STEP) is None else checked_step(fields[STEP])
    return FrameMetadata(bool(fields.get(END)), number if type(number) is int else None, step)


def encoded(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def decoded(text: Any, name: str) -> dict[str, Any]:
    """Parse a JSON object. Raises UsageError."""
    size = memoryview(text).nbytes
    if size > MAX_MESSAGE_BYTES:
        raise UsageError(f"{name}: {size:,} bytes; expected a JSON object of {MAX_MESSAGE_BYTES:,} at most")
    try:
        message = json.loads(memoryview(text).tobytes())
    except _NO_JSON as error:
        raise UsageError(f"{name}: expected a JSON object ({error})") from None
    if not isinstance(message, dict):
        raise UsageError(f"{name}: expected a JSON object, got {type(message).__name__}")
    return message


def json_object(text: Any) -> Any:
    """Return JSON as Python's data; None for anything else."""
    try:
        return json.loads(memoryview(text).tobytes())
    except _NO_JSON:
        return None


def schema_of(reader: Any, name: str) -> pa.Schema:
    """Return the schema of an incoming stream. Raises InputError if it has none."""
    try:
        return reader.schema
    except OSError as error:
        raise InputError(f"the stream has no schema: {error}", source=name) from None


def path_of(descriptor: flight.FlightDescriptor) -> list[str] | None:
    """Return a descriptor's path; None for a command."""
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        return None
    path = [step.decode("utf-8", "replace") for step in descriptor.path or []]
    return path or [""]


def as_flight(error: BaseException) -> flight.FlightError:
    """Convert an error for the other side: one line and its class."""
    if isinstance(error, flight.FlightError):
        return error
    text = _bounded(" ".join(str(error).split()) or type(error).__name__)
    for name, kind in _KINDS.items():
        if isinstance(error, kind):
            return flight.FlightServerError(text, extra_info=name.encode())
    if isinstance(error, ServiceError):
        return flight.FlightUnavailableError(text)
    if isinstance(error, PenstockError | pa.ArrowException):
        return flight.FlightServerError(text, extra_info=b"InputError")
    return flight.FlightInternalError(f"{type(error).__name__}: {text}")


def _bounded(text: str) -> str:
    """Return an error's text, without its middle if it is longer than MAX_ERROR_BYTES."""
    sent, half = text.encode("utf-8", "replace"), MAX_ERROR_BYTES // 2
    if len(sent) <= MAX_ERROR_BYTES:
        return sent.decode()
    return " … ".join(part.decode("utf-8", "ignore") for part in (sent[:half], sent[-half:]))


def from_flight(error: BaseException, address: str) -> PenstockError:
    """Convert an error of the other side or of the connection to one of penstock's."""
    text = str(error).split(". Detail: ")[0].split(". gRPC client debug context: ")[0]
    text = text.split(", with message: ")[-1] or "it does not answer this call"
    return received((getattr(error, "extra_info", None) or b"").decode("utf-8", "replace"), text, address)


def received(kind: str, text: str, address: str) -> PenstockError:
    """Return the error whose class and text the other side has sent."""
    if kind == "InputError":
        return InputError(text, source=address)
    return _KINDS.get(kind, ServiceError)(f"{address}: {text}")


@contextmanager
def flight_errors(address: str) -> Iterator[None]:
    """Convert the errors of Flight calls in the block to penstock's."""
    try:
        yield
    except PenstockError:
        raise
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        interrupts.check()  # a signal ends the call
        raise from_flight(error, address) from error
