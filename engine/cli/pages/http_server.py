"""The read-only HTTP server of a running command, for its metrics and its live page, on the standard library."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.errors import StateError, UsageError

# path → (content type, function that returns the body). A StateError from the function is answered with status 503.
Routes = Mapping[str, tuple[str, Callable[[], str]]]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
HTML = "text/html; charset=utf-8"
JSON = "application/json"
PLAIN = "text/plain; charset=utf-8"

# The page is self-contained and may connect only to this server.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def address_of(text: str, flag: str) -> tuple[str, int]:
    """Return (host, port) of ``127.0.0.1:9090``, ``:0`` (any free port, loopback only) or ``[::1]:80``.

    Raise UsageError for another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{flag} {text}: expected HOST:PORT, such as 127.0.0.1:9090; port 0 is any free one")
    return host.strip("[]") or "127.0.0.1", int(port)


class Server:
    """A server that answers GET and HEAD in background threads until it is closed.

    The constructor raises OSError if it cannot listen on the address.

    url : the server's URL, with the actual port
    """

    def __init__(self, address: tuple[str, int], routes: Routes) -> None:
        kind = _Server6 if ":" in address[0] else _Server4
        try:
            self._server = kind(address, _handler(routes))
        except OSError as error:
            problem = f"cannot listen: {(error.strerror or str(error)).lower()}; give another address"
            raise OSError(error.errno, problem, f"{address[0]}:{address[1]}") from error
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="penstock-http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server4(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, except when the client disconnected during the response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Server6(_Server4):
    address_family = socket.AF_INET6


def _handler(routes: Routes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "penstock", ""
        timeout = 10  # seconds, for a client's request

        def do_GET(self) -> None:
            kind, make = routes.get(self.path.partition("?")[0], ("", str))
            if not kind:
                self.send_error(404, explain=f"there are: {', '.join(routes)}")
                return
            try:
                status, body = 200, make().encode()
            except StateError as error:
                status, kind, body = 503, PLAIN, f"{error}\n".encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", POLICY),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            """Log nothing, since stderr belongs to the command."""

    return Handler
