"""Proxies that the environment names: no connection to this machine uses one, and errors name the variable."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Of HTTP, in the order in which most libraries look; gRPC reads lower case only.
HTTP = tuple(name for each in ("https_proxy", "http_proxy", "all_proxy") for name in (each, each.upper()))
GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def hint(variables: Sequence[str] = HTTP) -> str:
    """Return what ends the error of a connection that may have gone through a proxy. Its value may be a password."""
    name = next((name for name in variables if os.environ.get(name)), None)
    return "" if name is None else f" (through the proxy of {name}; set no_proxy to connect without it)"


def exempt_loopback() -> None:
    """Let the libraries of this process that read ``no_proxy`` reach this machine without a proxy."""
    if not hint():
        return
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join([*hosts, *(host for host in _LOOPBACK if host not in hosts)])
