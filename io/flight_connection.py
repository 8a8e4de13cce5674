"""Flight addresses, and the one place where a client's connection is opened."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from penstock.errors import UsageError
from penstock.io.flight_messages import flight_errors

SCHEMES = ("grpc://", "grpc+tcp://", "grpc+tls://")
TOKEN_VARIABLE, ROOTS_VARIABLE = "PENSTOCK_FLIGHT_TOKEN", "PENSTOCK_FLIGHT_ROOTS"

_ADDRESS = re.compile(r"(grpc|grpc\+tcp|grpc\+tls)://(\[[0-9a-fA-F:.]+\]|[^/:\[\]@?#\s]+):(\d{1,5})(?:/([^?#]*))?")

# gRPC keeps how long it waits before it tries an address again for the whole process: a new connection starts anew.
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
        found = _ADDRESS.fullmatch(uri)
        if found is None or int(found[3]) > 65535:
            raise UsageError(f"{uri}: expected an address such as grpc://127.0.0.1:8815, or grpc+tls://HOST:PORT")
        path = tuple(step for step in (found[4] or "").split("/") if step)
        return cls(found[2], int(found[3]), found[1] == "grpc+tls", path)

    @property
    def uri(self) -> str:
        """Without the path."""
        return f"{'grpc+tls' if self.tls else 'grpc'}://{self.host}:{self.port}"


def dial(
    address: Address, token: str | None = None, roots: str | os.PathLike[str] | None = None
) -> tuple[flight.FlightClient, flight.FlightCallOptions]:
    """A client, and what every call of it is given. Nothing is sent yet.

    token : None: PENSTOCK_FLIGHT_TOKEN of the environment, where it is set
    roots : PEM file of the certificates to trust; None: PENSTOCK_FLIGHT_ROOTS, else the system's
    """
    token = token or os.environ.get(TOKEN_VARIABLE)
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
