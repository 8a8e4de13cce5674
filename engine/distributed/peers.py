"""The connections between the processes of a job: one socket and one receiving thread per other process.

Three ways to talk. ``exchange`` is in lockstep: everybody calls it with the same tag, gives every other process a
message, and gets one from each; ``send`` and ``receive`` are the same between two, in their turn. ``post`` and
``collect`` are letters between threads (commits). Failure and the wish to stop may come at any time. Nobody takes part
in an exchange before everybody has in the one before, so what waits to be read is at most one exchange per process,
and what is sent between two; that everybody always receives is why sending cannot lock up.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import penstock.interrupts as interrupts
from penstock.distributed.relay import described, raised
from penstock.errors import PeerError

Piece = bytes | bytearray | memoryview
_EXCHANGE, _LETTER, _FAILURE, _STOP, _BYE = b"X", b"L", b"F", b"S", b"B"
_HEAD = struct.Struct("<cIQ")  # what it is, the length of its tag, of its body

# Between two looks at whether to stop.
TICK_S = 0.1
# How long the end may take: what is under way is read, so that nobody's last word is lost.
PARTING_S = 10.0


class Peers:
    """All processes of a job, as one of them sees the others.

    connections : rank → a connected socket, for every rank but this one; they are the Peers' from here on

    stopping : a signal or another process has asked for an end: ``KeyboardInterrupt`` at the next round
    agreed : the error that every process raises after the same frame, if one does
    """

    def __init__(self, rank: int, count: int, connections: dict[int, socket.socket]) -> None:
        self.rank, self.count = rank, count
        self._stopping = False
        self.agreed: BaseException | None = None
        self._told_stop = False
        self._sockets = connections
        self._sending = {other: threading.Lock() for other in connections}
        self._sent = dict.fromkeys(connections, 0)
        self._changed = threading.Condition()
        self._arrived: dict[int, deque[tuple[str, bytearray]]] = {other: deque() for other in connections}
        self._letters: dict[tuple[int, str], Any] = {}
        self._parted: set[int] = set()  # those that have come to their end
        self._failure: BaseException | None = None
        self._over = False
        self._threads = [threading.Thread(target=self._receive, args=(o,), daemon=True) for o in connections]
        for thread in self._threads:
            thread.start()

    @property
    def sent_bytes(self) -> int:
        """To all others, since this began."""
        return sum(self._sent.values())

    # ---- in lockstep

    def exchange(self, tag: str, outgoing: Sequence[Sequence[Piece]]) -> list[bytearray]:
        """outgoing : by rank, the pieces of a message; this process's own is not looked at.

        Returns the messages by rank, an empty one for this process. Raises what ended another process, or PeerError.
        """
        for step in range(1, self.count):  # not everybody to the same one first
            other = (self.rank + step) % self.count
            self.send(other, tag, outgoing[other])
        return [bytearray() if rank == self.rank else self.receive(rank, tag) for rank in range(self.count)]

    def send(self, to: int, tag: str, pieces: Sequence[Piece] = ()) -> None:
        """A message to one, who is at the same tag when this comes to its turn."""
        self._tell_stop()
        self._send(to, _EXCHANGE, tag, pieces)

    def receive(self, of: int, tag: str) -> bytearray:
        """The next message of one."""
        arrived = self._arrived[of]
        self._wait(lambda: arrived or of in self._parted)
        its_tag, message = arrived.popleft() if arrived else ("the end", bytearray())
        if its_tag != tag:
            raise self.fail(PeerError(f"process {of} is at '{its_tag}' and process {self.rank} at '{tag}'"))
        return message

    def gather(self, tag: str, value: Any) -> list[Any]:
        """Everybody's value, plain data, by rank."""
        pieces = [[json.dumps(value).encode()]] * self.count
        return [
            value if rank == self.rank else json.loads(body) for rank, body in enumerate(self.exchange(tag, pieces))
        ]

    # ---- letters

    def post(self, to: int, key: str, value: Any) -> None:
        """Leave plain data for another process, from any thread."""
        self._send(to, _LETTER, key, [json.dumps(value).encode()])

    def collect(self, of: int, key: str, given_up: Callable[[], bool]) -> Any:
        """Wait for what another process posts. Raises InterruptedError where it is given up meanwhile."""
        self._wait(lambda: (of, key) in self._letters or of in self._parted or given_up())
        with self._changed:
            if (of, key) in self._letters:
                return self._letters.pop((of, key))
        if given_up():
            raise InterruptedError("nobody waits for it any more")
        raise self.fail(PeerError(f"process {of} has ended, and process {self.rank} waits for its '{key}'"))

    # ---- the end

    @property
    def failure(self) -> BaseException | None:
        """What ended the job: nothing can be agreed on any more."""
        return self._failure

    @property
    def stopping(self) -> bool:
        return self._stopping or interrupts.arrived()

    def check(self) -> None:
        """Raise what has ended the job, if anything has."""
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Part in good order, or tell the others what happened here."""
        self._over = True
        for other in self._sockets:
            with suppress(OSError):
                if error is None:
                    self._send(other, _BYE)
                else:
                    self._send(other, _FAILURE, "", [json.dumps(described(error)).encode()])
                self._sockets[other].shutdown(socket.SHUT_WR)
        for thread in self._threads:
            thread.join(PARTING_S)
        for connection in self._sockets.values():
            connection.close()

    # ---- inside

    def _wait(self, ready: Callable[[], object]) -> None:
        """Until it is ready. What has arrived counts before what went wrong later."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ready() or self._failure is not None, TICK_S)
                if ready():
                    return
                self.check()
            self._tell_stop()

    def _tell_stop(self) -> None:
        if self.stopping and not self._told_stop:
            self._told_stop = True
            for other in self._sockets:
                with suppress(OSError):
                    self._send(other, _STOP)

    def _send(self, other: int, what: bytes, tag: str = "", pieces: Sequence[Piece] = ()) -> None:
        connection, name = self._sockets[other], tag.encode()
        try:
            with self._sending[other]:
                self._sent[other] += _HEAD.size + len(name) + sum(map(len, pieces))
                connection.sendall(_HEAD.pack(what, len(name), sum(map(len, pieces))) + name)
                for piece in pieces:
                    connection.sendall(piece)
        except OSError:
            if self._over:
                raise
            # Its last word, if it said one, is worth more than that nobody listens.
            self._threads[list(self._sockets).index(other)].join(PARTING_S)
            raise self.fail(self._lost(other)) from None

    def all_raise(self, error: BaseException) -> bool:
        """Whether everybody stops with this error after the same frame."""
        return error is self.agreed and self.failure is None

    def fail(self, error: BaseException) -> BaseException:
        """Nothing can be agreed on any more; the others hear of it when this process parts. Returns what came first."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            return self._failure

    def _lost(self, other: int) -> PeerError:
        return PeerError(
            f"process {other} of {self.count} is gone (its connection ended): start all processes again, from the "
            "checkpoint where there is one (penstock supervise does)"
        )

    def _receive(self, other: int) -> None:
        """The life of a receiving thread: until the other has parted, or is gone."""
        try:
            while self._take(other):
                pass
        except (OSError, EOFError):
            if not self._over:
                self.fail(self._lost(other))

    def _take(self, other: int) -> bool:
        what, tag_bytes, body_bytes = _HEAD.unpack(_exactly(self._sockets[other], _HEAD.size))
        tag = _exactly(self._sockets[other], tag_bytes).decode()
        body = _exactly(self._sockets[other], body_bytes)
        with self._changed:
            if what == _EXCHANGE:
                self._arrived[other].append((tag, body))
            elif what == _LETTER:
                self._letters[other, tag] = json.loads(body)
            elif what == _STOP:
                self._stopping = self._told_stop = True
            elif what == _FAILURE:
                self._failure = self._failure or raised(json.loads(body), other)
            elif what == _BYE:
                self._parted.add(other)
            self._changed.notify_all()
        return what not in (_FAILURE, _BYE)


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    """The next bytes of a connection. Raises EOFError where it ends before."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return received
