"""Flight addresses, and connections to a service: how one is opened, and how a call is retried over a new one."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

import penstock.base.forks as forks
import penstock.io.proxies as proxies
from penstock.base.errors import InputError, PenstockError, ServiceError, UsageError, UsageTypeError
from penstock.base.limited_calls import interruptible
from penstock.base.validation import is_loopback
from penstock.io.error_tables import UNLISTED, USAGE
from penstock.io.flight_errors import ERRORS
from penstock.io.patience import Patience
from penstock.serving.flight.messages import encoded, flight_errors, from_flight, json_object

T = TypeVar("T")
Roots = str | os.PathLike[str] | bytes | None

TOKEN_VARIABLE, ROOTS_VARIABLE = "PENSTOCK_FLIGHT_TOKEN", "PENSTOCK_FLIGHT_ROOTS"

_ADDRESS = re.compile(r"(grpc|grpc\+tcp|grpc\+tls)://(\[[0-9a-fA-F:.]+\]|[^/:\[\]@?#\s]+):(\d{1,5})(?:/([^?#]*))?")

# The errors that a new connection may fix, unless their table says otherwise; all others are raised at once.
PASSING = (
    flight.FlightUnavailableError,
    flight.FlightCancelledError,
    flight.FlightTimedOutError,
    flight.FlightInternalError,
    OSError,
)
# Those of a service that a proxy may hide.
_UNREACHABLE = (flight.FlightUnavailableError, flight.FlightTimedOutError, flight.FlightInternalError)

# A service that freezes in mid-stream answers no ping, and a minute later gRPC ends the stream. Its servers refuse
# clients that ping a quiet stream more often than every 5 minutes.
KEEPALIVE_MS, ANSWER_MS = 330_000, 60_000
# gRPC stores the backoff of an address for the whole process; with this option a new connection resets it.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_NO_PROXY = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True)
class Address:
    """``grpc://HOST:PORT/PATH`` taken apart. tls : whether the scheme is ``grpc+tls``"""

    host: str
    port: int
    tls: bool
    path: tuple[str, ...] = ()

    @classmethod
    def of(cls, uri: str) -> Address:
        match = _ADDRESS.fullmatch(uri)
        if match is None or int(match[3]) > 65535:
            raise UsageError(f"{uri}: expected an address such as grpc://127.0.0.1:8815, or grpc+tls://HOST:PORT")
        path = tuple(step for step in (match[4] or "").split("/") if step)
        return cls(match[2], int(match[3]), match[1] == "grpc+tls", path)

    @property
    def uri(self) -> str:
        """Return the address without the path."""
        return f"{'grpc+tls' if self.tls else 'grpc'}://{self.host}:{self.port}"

    def may_pass_token_to(self, other: Address) -> bool:
        """Return whether a token for this address may go to the other: the same host, with no less encryption."""
        return other.host.lower() == self.host.lower() and other.tls >= self.tls

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the address."""
        return is_loopback(self.host.strip("[]"))


def dial(
    address: Address, token: str | None = None, roots: Roots = None
) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
    """Return a client and the options of its calls. Nothing is sent yet.

    token : None: PENSTOCK_FLIGHT_TOKEN of the environment, if set; "": send no token
    roots : the certificates to trust, as PEM, or their file; None: PENSTOCK_FLIGHT_ROOTS, else the system's
    """
    certificates = trusted_certificates(address, roots)
    tls = {} if certificates is None else {"tls_root_certs": certificates}
    options, generic = call_options(token), [*_OPTIONS, *_keepalive(), *(_NO_PROXY if address.is_loopback else [])]
    with flight_errors(address.uri):
        return flight.FlightClient(address.uri, generic_options=generic, **tls), options


def _keepalive() -> list[tuple[str, int]]:
    answer = [(name, ANSWER_MS) for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")]
    return [("grpc.keepalive_time_ms", KEEPALIVE_MS), ("grpc.http2.max_pings_without_data", 0), *answer]


def call_options(token: str | None, timeout_s: float | None = None) -> flight.FlightCallOptions:
    """Return the options of a call. timeout_s : of all of it; None: it may take any time"""
    token = checked_token(os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE) if token is None else checked_token(token)
    headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
    return flight.FlightCallOptions(timeout=timeout_s, headers=headers)


def trusted_certificates(address: Address, roots: Roots) -> bytes | None:
    """Return the certificates to trust, as PEM; None: the system's. Raises UsageError."""
    roots = roots or os.environ.get(ROOTS_VARIABLE)
    return _certificates(roots) if address.tls and roots else None


def checked_token(token: str | None, name: str = "token") -> str | None:
    """Return a token without white space around it, as files of tokens are read. name : of what has it, for messages

    Raises UsageError for one that no header can have. Its message contains nothing of the token.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise UsageTypeError(f"{name}: expected a token as str, got {type(token).__name__}")
    token = token.strip().removeprefix("\ufeff")
    if not re.fullmatch(r"[!-~]*", token):
        raise UsageError(f"{name}: expected one token, ASCII without spaces: not its role, and not several lines")
    return token


def _certificates(roots: str | os.PathLike[str] | bytes) -> bytes:
    """Return certificates as PEM. Raises UsageError."""
    name = "roots" if isinstance(roots, bytes) else os.fspath(roots)
    try:
        pem = roots if isinstance(roots, bytes) else Path(roots).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except OSError as error:  # also an SSLError
        reason = getattr(error, "reason", None) or error.strerror
        raise UsageError(f"{name}: cannot read the certificates ({reason})") from None
    except ValueError as error:
        raise UsageError(f"{name}: expected certificates as PEM ({error})") from None
    return pem


class Connection:
    """A connection to one service, opened at the first call and again after a failure. For one thread at a time.

    token, roots : as for ``dial``; patience_s : how long to retry a call
    timeout_s : of each action, but not of streams; None: it may take any time

    uri : the address
    """

    def __init__(
        self, address: Address, token: str | None, roots: Roots, patience_s: float, timeout_s: float | None = None
    ) -> None:
        self._address, self._token, self._roots, self.patience_s = address, checked_token(token), roots, patience_s
        self._timeout_s = timeout_s
        self.uri, self._process = address.uri, forks.this_process
        self._open: tuple[flight.FlightClient, flight.FlightCallOptions] | None = None
        self._trusted: bytes | None = None  # by the connection that is open

    def opened(self) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
        self.check_process()
        if self._open is None:
            self._trusted = trusted_certificates(self._address, self._roots)
            self._open = dial(self._address, self._token, self._trusted or self._roots)
        return self._open

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._open is not None and not self.is_forked:
            self._open[0].close()
            self._open = None

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that connects: gRPC has no thread in it."""
        return self._process != forks.this_process

    def check_process(self) -> None:
        """Raise StateError in a fork."""
        forks.check(self._process, f"the connection to {self.uri}")

    def act(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Call an action and return its answer."""
        return self.retried(lambda: self._answer(kind, arguments))

    def act_once(self, kind: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Call an action that must not happen twice: after a lost connection it may have happened."""
        try:
            return self._answer(kind, arguments, timeout_s)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self.close()
            raise from_flight(error, self.uri) from error

    def _answer(self, kind: str, arguments: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        client, _ = self.opened()
        options = call_options(self._token, timeout_s or self._timeout_s)
        action = flight.Action(kind, encoded(arguments))
        answers = interruptible(
            lambda: [answer.body for answer in client.do_action(action, options)], f"its answer to '{kind}'", self.uri
        )
        message = json_object(answers[0]) if len(answers) == 1 else None
        if not isinstance(message, dict):
            raise InputError(f"it answers '{kind}' with something else than penstock does", source=self.uri)
        return message

    def get(self, ticket: dict[str, Any]) -> flight.FlightStreamReader:
        client, options = self.opened()
        return client.do_get(flight.Ticket(encoded(ticket)), options)

    def retried(self, attempt: Callable[[], T]) -> T:
        """Repeat a call over new connections until it succeeds or patience ends."""
        kinds = (PenstockError, flight.FlightError, pa.ArrowException, OSError)
        # An attempt may take longer than its patience.
        return Patience(self.patience_s, starts_over=False).call(attempt, self.lost, kinds)

    def lost(self, error: BaseException) -> PenstockError:
        """Close the connection after an error, which is returned. Raises it if a new connection cannot help."""
        problem = self.passing(error)
        self.close()
        return problem

    def passing(self, error: BaseException) -> PenstockError:
        """Return an error that a new connection may fix, converted; raise any other one."""
        if isinstance(error, PenstockError):
            raise error
        problem, row = from_flight(error, self.uri), ERRORS.row(error)
        if has_wrong_certificate(error) and not self._trusts_others():
            reason = re.split(r"::|\d: ", str(problem))[-1]
            raise ServiceError(f"{self.uri}: no connection with its certificate: {reason}") from error
        heals = isinstance(error, PASSING) if row is None else row.code is None or has_wrong_certificate(error)
        if not heals:
            raise problem from error
        hint = proxies.hint(proxies.GRPC) if isinstance(error, _UNREACHABLE) and not self._address.is_loopback else ""
        return type(problem)(f"{problem}{'' if row else f' {UNLISTED}'}{hint}")

    def _trusts_others(self) -> bool:
        """Return whether the file of certificates to trust has changed since gRPC got it, which keeps what it got."""
        return self._open is not None and trusted_certificates(self._address, self._roots) != self._trusted


def has_wrong_certificate(error: BaseException | None) -> bool:
    """Return whether an error is about the certificate of the service."""
    return isinstance(error, flight.FlightUnavailableError) and ERRORS.is_final(error)


@contextmanager
def as_source() -> Iterator[None]:
    """Convert the errors of a service that a command reads: InputError, or UsageError for credentials."""
    try:
        yield
    except ServiceError as error:
        row = None if error.__cause__ is None else ERRORS.row(error.__cause__)
        if row is not None and row.code is not None:
            raise (UsageError if row.code == USAGE else InputError)(f"{error}; {row.advice}") from error
        raise InputError(str(error)) from error
