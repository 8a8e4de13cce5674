"""Flight addresses, and connections to a service: how one is opened, and how a call is retried over a new one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import PenstockError, UsageError
from penstock.io.flight.messages import encoded, flight_errors, from_flight
from penstock.io.patience import Patience
from penstock.validation import is_loopback

T = TypeVar("T")

TOKEN_VARIABLE, ROOTS_VARIABLE = "PENSTOCK_FLIGHT_TOKEN", "PENSTOCK_FLIGHT_ROOTS"

_ADDRESS = re.compile(r"(grpc|grpc\+tcp|grpc\+tls)://(\[[0-9a-fA-F:.]+\]|[^/:\[\]@?#\s]+):(\d{1,5})(?:/([^?#]*))?")

# The errors that a new connection may fix; all others are raised at once.
PASSING = (
    flight.FlightUnavailableError,
    flight.FlightCancelledError,
    flight.FlightTimedOutError,
    flight.FlightInternalError,
    OSError,
)

# gRPC stores the backoff of an address for the whole process; with this option a new connection resets it.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


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
    address: Address, token: str | None = None, roots: str | os.PathLike[str] | None = None
) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
    """Return a client and the options of its calls. Nothing is sent yet.

    token : None: PENSTOCK_FLIGHT_TOKEN of the environment, if set; "": send no token
    roots : PEM file of the certificates to trust; None: PENSTOCK_FLIGHT_ROOTS, else the system's
    """
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    roots = roots or os.environ.get(ROOTS_VARIABLE)
    tls: dict[str, Any] = {}
    if address.tls and roots:
        try:
            tls["tls_root_certs"] = Path(roots).read_bytes()
        except OSError as error:
            raise UsageError(f"{os.fspath(roots)}: cannot read the certificates ({error.strerror})") from None
    headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
    with flight_errors(address.uri):
        client = flight.FlightClient(address.uri, generic_options=_OPTIONS, **tls)
    return client, flight.FlightCallOptions(headers=headers)


class Connection:
    """A connection to one service, opened at the first call and again after a failure. For one thread at a time.

    token, roots : as for ``dial``; patience_s : how long to retry a call

    uri : the address
    """

    def __init__(self, address: Address, token: str | None, roots: str | None, patience_s: float) -> None:
        self._address, self._token, self._roots, self.patience_s = address, token, roots, patience_s
        self.uri = address.uri
        self._open: tuple[flight.FlightClient, flight.FlightCallOptions] | None = None

    def opened(self) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
        if self._open is None:
            self._open = dial(self._address, self._token, self._roots)
        return self._open

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._open is not None:
            self._open[0].close()
            self._open = None

    def act(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Call an action and return its answer."""
        return self.retried(lambda: self._answer(kind, arguments))

    def act_once(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Call an action that must not happen twice: after a lost connection it may have happened."""
        try:
            return self._answer(kind, arguments)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self.close()
            raise from_flight(error, self.uri) from error

    def _answer(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        client, options = self.opened()
        (answer,) = client.do_action(flight.Action(kind, encoded(arguments)), options)
        message: dict[str, Any] = json.loads(answer.body.to_pybytes())
        return message

    def get(self, ticket: dict[str, Any]) -> flight.FlightStreamReader:
        client, options = self.opened()
        return client.do_get(flight.Ticket(encoded(ticket)), options)

    def retried(self, attempt: Callable[[], T]) -> T:
        """Repeat a call over new connections until it succeeds or patience ends."""
        patience = Patience(self.patience_s)
        while True:
            try:
                return attempt()
            except (PenstockError, flight.FlightError, pa.ArrowException, OSError) as error:
                self.recover(error, patience)

    def recover(self, error: BaseException, patience: Patience) -> None:
        """Pause for a new connection after an error. Raises it if that cannot help, or patience is over."""
        problem = self.passing(error)
        self.close()
        patience.wait(problem)

    def passing(self, error: BaseException) -> PenstockError:
        """Return an error that a new connection may fix, converted; raise any other one."""
        if isinstance(error, PenstockError):
            raise error
        problem = from_flight(error, self.uri)
        if isinstance(error, PASSING):
            return problem
        raise problem from error
