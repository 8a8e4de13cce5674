"""A Flight server on a port, with the limits on its calls and connections, from the first call to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.flight as flight

from penstock.base.errors import ListenError
from penstock.serving.flight.connection import Address
from penstock.serving.service.auth import CallAdmission, Certificates, Tokens
from penstock.serving.service.connections import Connections
from penstock.serving.service.limits import Limits

# At the end: how long connections without a call have to answer gRPC, which would wait 20 s for one that does not; and
# for how long, and how often, the remaining ones are shut down.
LEAVE_S, CUT_S, CUT_EVERY_S = 1.0, 10.0, 0.05
# Between two attempts to listen at the port that a server has just left.
REBIND_PAUSE_S = 0.01


class Listener:
    """A server, which listens from ``listen`` on.

    address : to listen at; port 0 selects a free port
    tls : certificate and key
    create : returns the server, given its address, certificates and the admission of its calls
    """

    def __init__(
        self,
        address: Address,
        tokens: Tokens,
        limits: Limits,
        tls: Certificates,
        create: Callable[[Address, Certificates, CallAdmission], flight.FlightServerBase],
    ) -> None:
        self.address, self._tls, self._create = address, tls, create
        # Servers with earlier certificates, which complete their calls, and the threads that wait for these.
        self._leaving: list[tuple[flight.FlightServerBase, threading.Thread]] = []
        self.connections = Connections(limits)
        self.admission = CallAdmission(tokens, limits.calls, self.connections)

    def listen(self) -> None:
        """Begin to serve calls, even before this returns. Raises ListenError if it cannot listen at the address."""
        try:
            self._server = self._listening(self.address, self._tls)
        except BaseException:
            self.connections.close()
            raise
        self.address = Address(self.address.host, self._server.port, self.address.tls)
        self.connections.watch(self._server.port)

    def renew(self, tokens: Tokens, tls: Certificates) -> bool:
        """Admit calls by other tokens, and accept connections with another certificate.

        Calls by tokens that are no longer there end with their connections. Those in progress under the certificate
        before complete. pyarrow gives gRPC a certificate only when a server is created, so another server takes over
        the port; callers retry what they call in these milliseconds.

        Returns whether the certificate is another one. Raises ListenError if the port was lost.
        """
        self.admission.replace_tokens(tokens)
        if tls == self._tls:
            return False
        self._leave()
        self._server, self._tls = self._listening(self.address, tls, time.monotonic() + CUT_S, " again"), tls
        return True

    def _listening(
        self, address: Address, tls: Certificates, until_s: float = 0.0, again: str = ""
    ) -> flight.FlightServerBase:
        """Return a server. until_s : how long to try, by the monotonic clock; again : for the message"""
        while True:
            try:
                return self._create(address, tls, self.admission)
            except (pa.ArrowException, flight.FlightError, OSError) as error:
                if time.monotonic() >= until_s:
                    reason = " ".join(str(error).split())[:200]
                    raise ListenError(f"cannot listen at {address.uri}{again}: {reason}; is it taken?") from error
            time.sleep(REBIND_PAUSE_S)

    def _leave(self) -> None:
        """Stop accepting connections, and wait for the calls of the current server on another thread."""
        leaving = threading.Thread(target=self._server.shutdown, name="penstock-shutdown", daemon=True)
        leaving.start()
        self._leaving = [(server, thread) for server, thread in self._leaving if thread.is_alive()]
        self._leaving.append((self._server, leaving))

    def counts(self) -> dict[str, int]:
        """Return the counts of callers."""
        return {
            "connections": self.connections.num_open,
            "calls": self.admission.num_calls,
            "refused": self.admission.num_refused,
        }

    def close(self, grace_s: float) -> bool:
        """Wait for calls to complete, shut down the other connections, and stop listening.

        grace_s : how long to wait for calls
        Returns whether that succeeded. Otherwise gRPC still serves a call, which only the end of the process ends.
        """
        has_left = self.admission.wait_until_empty(grace_s)
        self._leave()
        threads = [thread for _, thread in self._leaving]
        if has_left:  # the last answers may still be in flight
            threads[-1].join(LEAVE_S)
        until_s = time.monotonic() + CUT_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < until_s:
            self.connections.shut_down_all()
            threads[-1].join(CUT_EVERY_S)
        self.connections.close()
        return not any(thread.is_alive() for thread in threads)
