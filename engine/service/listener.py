"""A Flight server on a port, with the limits on its calls and connections, from the first call to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import ListenError
from penstock.io.flight.connection import Address
from penstock.service.auth import CallAdmission, Tokens
from penstock.service.connections import Connections
from penstock.service.limits import Limits

# At the end: how long connections without a call have to answer gRPC, which would wait 20 s for one that does not; and
# for how long, and how often, the remaining ones are shut down.
LEAVE_S, CUT_S, CUT_EVERY_S = 1.0, 10.0, 0.05


class Listener:
    """A server that listens once it is constructed.

    address : to listen at; port 0 selects a free port
    create : returns the server, given the admission of its calls

    Raises ListenError if it cannot listen at the address.
    """

    def __init__(
        self,
        address: Address,
        tokens: Tokens,
        limits: Limits,
        create: Callable[[CallAdmission], flight.FlightServerBase],
    ) -> None:
        self.connections = Connections(limits)
        self.admission = CallAdmission(tokens, limits.calls, self.connections)
        try:
            self._server = create(self.admission)
        except BaseException as error:
            self.connections.close()
            if isinstance(error, pa.ArrowException | flight.FlightError | OSError):
                reason = " ".join(str(error).split())[:200]
                raise ListenError(f"cannot listen at {address.uri}: {reason}; is it taken?") from error
            raise
        self.address = Address(address.host, self._server.port, address.tls)
        self.connections.watch(self._server.port)

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
        leaving = threading.Thread(target=self._server.shutdown, name="penstock-shutdown", daemon=True)
        leaving.start()
        if has_left:  # the last answers may still be in flight
            leaving.join(LEAVE_S)
        until_s = time.monotonic() + CUT_S
        while leaving.is_alive() and time.monotonic() < until_s:
            self.connections.shut_down_all()
            leaving.join(CUT_EVERY_S)
        self.connections.close()
        return not leaving.is_alive()
