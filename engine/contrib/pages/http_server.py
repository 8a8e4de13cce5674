"""The read-only HTTP server of a running command, for its metrics and its live page, on the standard library.

On the loopback interface it answers requests that name this machine as their host, so that a page of another site
cannot read it through a name that the site resolves to 127.0.0.1. Elsewhere it may require a token.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from penstock.base.errors import StateError, UsageError
from penstock.base.validation import is_loopback

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


@dataclass(frozen=True)
class PageAccess:
    """Who may read pages that other machines reach.

    admits : returns whether a value of the header ``authorization`` contains a token; tls : None: in clear text
    """

    admits: Callable[[bytes], bool]
    tls: ssl.SSLContext | None = None


class Server(ThreadingHTTPServer):
    """A server that answers GET and HEAD in background threads until it is closed.

    access : None: it needs no token
    The constructor raises OSError if it cannot listen on the address.

    url : the server's URL, with the actual port
    """

    def __init__(self, address: tuple[str, int], routes: Routes, access: PageAccess | None = None) -> None:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        hosts = {"localhost", "127.0.0.1", "[::1]", host.lower()} if is_loopback(address[0]) else None
        self.tls = None if access is None else access.tls
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, _handler(routes, hosts, access))
        except OSError as error:
            problem = f"cannot listen: {(error.strerror or str(error)).lower()}; give another address"
            raise OSError(error.errno, problem, f"{address[0]}:{address[1]}") from error
        self.url = f"{'https' if self.tls else 'http'}://{host}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.1,), name="penstock-http", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The thread that answers it makes the handshake, which may take long."""
        connection, client = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, except when the client disconnected during the response, or does not speak TLS."""
        if not isinstance(sys.exception(), ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


def _handler(routes: Routes, hosts: set[str] | None, access: PageAccess | None) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests. hosts : that a request may name; None: any"""
    # Cookies are sent to every port of a host, so this one is no token, and its name contains the port. A session ends
    # with its token, which the service may read no longer from its file. cookie → value of the header authorization
    key, sessions = secrets.token_bytes(32), dict[str, bytes]()
    secure = "; Secure" if access is not None and access.tls is not None else ""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "penstock", ""
        timeout = 10  # seconds, for a client's request

        def do_GET(self) -> None:
            if hosts is not None and not hosts.issuperset(map(_host, self.headers.get_all("Host", []))):
                self._answer(403, PLAIN, f"this server answers to {', '.join(sorted(hosts))} only\n")
                return
            path, _, query = self.path.partition("?")
            more = {}
            if access is not None:
                token = parse_qs(query).get("token")
                bearer = b"Bearer " + token[0].encode("utf-8", "replace") if token is not None else b""
                if token is not None and access.admits(bearer):
                    session = hmac.new(key, bearer, "sha256").hexdigest()
                    sessions[session] = bearer
                    more["Set-Cookie"] = f"{self._cookie}={session}; Path=/; HttpOnly; SameSite=Strict{secure}"
                elif not self._is_admitted(access):
                    more["WWW-Authenticate"] = 'Bearer realm="penstock"'
                    refusal = (
                        "send a token of the service: Authorization: Bearer TOKEN; in a browser ?token=TOKEN, once\n"
                    )
                    self._answer(401, PLAIN, refusal, more)
                    return
            kind, make = routes.get(path, ("", str))
            if not kind:
                self._answer(404, PLAIN, f"there are: {', '.join(routes)}\n")
                return
            try:
                self._answer(200, kind, make(), more)
            except StateError as error:
                self._answer(503, PLAIN, f"{error}\n", more)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            """Log nothing, since stderr belongs to the command."""

        @property
        def _cookie(self) -> str:
            return f"penstock-{self.connection.getsockname()[1]}"

        def _is_admitted(self, access: PageAccess) -> bool:
            """Return whether the request has a token or the cookie."""
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
            except CookieError:
                cookie = None
            session = b"" if cookie is None else sessions.get(cookie.value, b"")
            sent = [value.encode("utf-8", "replace") for value in self.headers.get_all("Authorization", [])]
            return any(access.admits(authorization) for authorization in (session, *sent))

        def _answer(self, status: int, kind: str, text: str, more: Mapping[str, str] | None = None) -> None:
            body = text.encode()
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", POLICY),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
                *(more or {}).items(),
            ):
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _host(header: str) -> str:
    """Return the host of the header Host, without its port."""
    host, colon, port = header.strip().lower().rpartition(":")
    return host if colon and port.isdecimal() else header.strip().lower()
