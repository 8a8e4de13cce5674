"""Limits on connections to the service: their number, and how long one may stay idle.

gRPC accepts every connection, and pyarrow does not expose gRPC's settings for servers. So a thread checks twice a
second the sockets that the process has accepted on the service's port, and shuts down those above the limit or idle for
too long. gRPC then sees a closed connection, and closes the descriptor.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote

from penstock.base.filesystem import atomic_files, descriptors
from penstock.serving.service.limits import Limits

# The time that a connection has for its first admitted call.
FIRST_CALL_S = 10.0
CHECK_EVERY_S = 0.5
# The fraction of the process's descriptors that connections may use.
FRACTION = 0.75
# How long to wait for a descriptor while connections have all of them, and the pause between two attempts.
DESCRIPTOR_WAIT_S, DESCRIPTOR_PAUSE_S = 30.0, 0.05
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)

Peer = tuple[str, int]  # address and port
T = TypeVar("T")


def when_free(call: Callable[[], T]) -> T:
    """Return the result of a call that needs a descriptor. While there is none, repeat it: the checks free some."""
    until_s = time.monotonic() + DESCRIPTOR_WAIT_S
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in _NONE_LEFT or time.monotonic() > until_s:
                raise
        time.sleep(DESCRIPTOR_PAUSE_S)


class _WaitingOperations(atomic_files.Operations):
    """File operations that wait for a descriptor."""

    def create(self, path: Path) -> int:
        return when_free(partial(super().create, path))

    def open_lock(self, path: Path) -> int:
        return when_free(partial(super().open_lock, path))

    def sync_folder(self, path: Path) -> None:
        when_free(partial(super().sync_folder, path))


def wait_for_descriptors() -> None:
    """Let what this process writes from now on, such as commits, wait for descriptors."""
    atomic_files.operations = _WaitingOperations()


class Call(Protocol):
    """A call in progress. idle_since_s : since when it waits for a request; None: it does not wait

    ends_at_s : when its connection is closed
    """

    idle_since_s: float | None

    @property
    def ends_at_s(self) -> float: ...


@dataclass
class _Connection:
    """One connection. since_s : when it was found, or its last call ended; was_admitted : whether any call was"""

    since_s: float
    was_admitted: bool = False
    calls: set[Call] = field(default_factory=set)

    @property
    def ends_at_s(self) -> float:
        return min((call.ends_at_s for call in self.calls), default=float("inf"))

    @property
    def idle_since_s(self) -> float | None:
        """Return since when no call is at work; None: one is."""
        times = [call.idle_since_s for call in self.calls]
        return max((self.since_s, *(time_s for time_s in times if time_s is not None))) if None not in times else None


class Connections:
    """The connections of one port. Report every admitted call to ``begin_call`` and ``end_call``, with its peer."""

    def __init__(self, limits: Limits) -> None:
        self._most = max(1, min(limits.connections, int(FRACTION * descriptors.limit())))
        self._idle_s = limits.idle_s
        self._lock = threading.Lock()
        self._known: dict[Peer, _Connection] = {}
        self._sockets = _Sockets()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Return the number of connections at the last check."""
        return len(self._known)

    def watch(self, port: int) -> None:
        """Start to check the connections of a port."""
        self._port = port
        self._thread = threading.Thread(target=self._run, name="penstock-connections", daemon=True)
        self._thread.start()

    def begin_call(self, peer: str, call: Call) -> None:
        with self._lock:
            connection = self._known.setdefault(_peer_of(peer), _Connection(time.monotonic()))
            connection.was_admitted = True
            connection.calls.add(call)

    def end_call(self, peer: str, call: Call) -> None:
        with self._lock:
            connection = self._known[_peer_of(peer)]
            connection.calls.discard(call)
            connection.since_s = time.monotonic()

    def shut_down_all(self) -> None:
        """Shut down all connections, also those with calls in progress."""
        if not self._over.is_set():
            self._shut_down(list)

    def close(self) -> None:
        """Stop the checks. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._sockets.close()

    def _run(self) -> None:
        while not self._over.wait(CHECK_EVERY_S):
            self._shut_down(self._excess)

    def _shut_down(self, select: Callable[[Iterable[Peer]], list[Peer]]) -> None:
        with self._sockets.open_on(self._port) as descriptors:
            for peer in select(descriptors):
                self._sockets.shut_down(descriptors[peer], peer)

    def _excess(self, peers: Iterable[Peer]) -> list[Peer]:
        """Return the connections to shut down: idle for too long, or above the limit, those without any call first; and
        those with a call that has to end."""
        now_s = time.monotonic()
        with self._lock:
            known = {peer: self._known.get(peer) or _Connection(now_s) for peer in peers}
            surplus = len(known) - self._most
            # A call may begin before its connection is found.
            self._known = known | {peer: each for peer, each in self._known.items() if each.calls}
            idle = sorted(
                (each.was_admitted, since_s, peer)
                for peer, each in known.items()
                if (since_s := each.idle_since_s) is not None
            )
        first_call_s = min(FIRST_CALL_S, self._idle_s)
        overdue = [peer for peer, each in known.items() if each.ends_at_s <= now_s]
        return overdue + [
            peer
            for index, (was_admitted, since_s, peer) in enumerate(idle)
            if index < surplus or now_s - since_s > (self._idle_s if was_admitted else first_call_s)
        ]


class _Sockets:
    """The sockets that this process has accepted.

    One descriptor is duplicated onto each of them in turn. So a check needs no new descriptor, of which none may be
    left; and it shuts down the socket that it has examined, even if gRPC closes descriptors meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # AF_INET6 has the longest addresses.
        self._probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, socket.socket(socket.AF_UNIX).detach())
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @contextmanager
    def open_on(self, port: int) -> Iterator[dict[Peer, int]]:
        """Yield the descriptors of connections to a port, by peer. Call ``shut_down`` within the block."""
        with self._lock:
            try:
                descriptors = {}
                for descriptor in _descriptors():
                    if (peer := self._peer(descriptor, port)) is not None:
                        descriptors[peer] = descriptor
                yield descriptors
            finally:  # release the last socket
                os.dup2(self._nothing, self._probe.fileno(), False)

    def shut_down(self, descriptor: int, peer: Peer) -> None:
        with suppress(OSError):
            os.dup2(descriptor, self._probe.fileno(), False)
            if _plain(self._probe.getpeername()) == peer:
                self._probe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._probe.close()
            os.close(self._nothing)

    def _peer(self, descriptor: int, port: int) -> Peer | None:
        """Return the peer of a descriptor; None if it is not an accepted connection to the port."""
        if descriptor == self._probe.fileno():
            return None
        try:
            os.dup2(descriptor, self._probe.fileno(), False)
            here = self._probe.getsockname()
            return _plain(self._probe.getpeername()) if isinstance(here, tuple) and here[1] == port else None
        except OSError:
            return None


def _descriptors() -> Iterable[int]:
    """Return the descriptors of this process, if the system lists them; some may be closed already."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError as error:
        return range(descriptors.limit()) if error.errno in _NONE_LEFT else []


@lru_cache
def _peer_of(peer: str) -> Peer:
    """Parse a peer in gRPC's form: ``ipv4:127.0.0.1:40000``, ``ipv6:%5B::1%5D:40000``."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain((host.strip("[]"), int(port)))


def _plain(address: tuple[str, int] | tuple[str, int, int, int]) -> Peer:
    return address[0].removeprefix("::ffff:").partition("%")[0], address[1]
