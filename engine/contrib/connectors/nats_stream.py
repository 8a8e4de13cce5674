"""A stream of NATS JetStream as a partition: the sequence of a message is the number of its frame."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.base.errors import PenstockError
from penstock.io.error_tables import (
    HANDSHAKE,
    NO_TLS,
    UNREACHABLE,
    ErrorRow,
    ErrorTable,
    names_of,
    text_of,
    untrusted,
)
from penstock.io.partitions.broker_partition import Message, Partition, RetainedRange
from penstock.io.partitions.partition_source import TopicKind
from penstock.io.registry import Library, match_uri

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


def _names(error: BaseException) -> Iterator[str]:
    yield from names_of(error)
    yield str(getattr(error, "err_code", None))  # of the server's answer


ERRORS = ErrorTable(
    ErrorRow(
        "there is no such stream (one that was there before is waited for)",
        2,
        "NotFoundError 10059",
        advice="create the stream, or correct its name",
    ),
    ErrorRow(
        "the server has no JetStream, or none for this account",
        2,
        "10076 10039",
        "jetstream not enabled",
        "start the server with JetStream (nats-server -js), and enable it for the account",
    ),
    ErrorRow(
        "the user is not authorized, or may not use the subjects of JetStream",
        2,
        "AuthorizationError AuthenticationExpiredError",
        "authoriz|authentic|permissions? violation|account (is )?disabled|user authentication (expired|revoked)",
        "check its permissions for $JS.API.> and _INBOX.>, and the user and the password in the URI",
    ),
    ErrorRow("the server requires TLS", 2, "SecureConnRequiredError", "tls required", "use tls://HOST:PORT"),
    untrusted("SSL_CERT_FILE in the environment"),
    NO_TLS,
    ErrorRow(
        "JetStream is not available for the moment: it elects a leader, or is full",
        None,
        "ServiceUnavailableError ServerError NoRespondersError NoStreamResponseError 10008 10009 10023 10047",
        advice="is JetStream enabled on the server?",
    ),
    ErrorRow(
        "the stream was created again: whether it is the one of the position decides (5)",
        None,
        "",
        "was deleted and created again",
    ),
    HANDSHAKE,
    UNREACHABLE._replace(
        names=f"{UNREACHABLE.names} NoServersError StaleConnectionError ConnectionClosedError UnexpectedEOF "
        "OutboundBufferLimitError ConnectionDrainingError ConnectionReconnectingError"
    ),
    names=_names,
    text=lambda error: getattr(error, "description", None) or text_of(error).removeprefix("nats: "),
)
SOURCE = TopicKind(
    title="NATS JetStream",
    form="nats://HOST:PORT/STREAM",
    schemes=("nats://", "tls://"),
    example="nats://127.0.0.1:4222/gradients",
    errors=ERRORS,
    library=Library("nats", "nats"),
    unit="its sequence",
    partitions=lambda uri: [NatsStream(uri)],
)
_URI = re.compile(r"(nats|tls)://((?:[^/\s?#@]*@)?[^/\s?#@]+)/([^/\s?#@.*>]+)")
# Messages in one request; how long the server keeps a consumer that requests none.
BATCH = 256
_IDLE_S = 3600.0
_TIMEOUT_S = 5.0
# Pause before the client's one retry; more of them are up to the caller.
_RETRY_S = 0.1
# A request for messages that have arrived.
_SHORTEST_S = 0.01


class NatsStream(Partition):
    """The stream of ``nats://HOST:PORT/STREAM``. The server stores no position: penstock's checkpoint does."""

    kind = "stream"

    def __init__(self, uri: str) -> None:
        scheme, server, self._stream = match_uri(_URI, uri, SOURCE.form, "#/?@", "a user or a password").groups()
        super().__init__(f"nats/{self._stream}", f"{scheme}://{server.rpartition('@')[2]}/{self._stream}")
        self._nats = SOURCE.load()
        self._server = f"{scheme}://{server}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Any = None
        self._consumer: Any = None
        self._next = 1
        self._created: str | None = None  # as ``creation`` returned it last
        self._causes: deque[Exception] = deque(maxlen=1)

    def place(self, number: int) -> str:
        return f"{self.description}, sequence {number}"

    def creation(self) -> str:
        self._created = self._run(self._creation())
        return self._created

    def retained_range(self) -> RetainedRange:
        return self._run(self._retained_range())

    def seek(self, number: int) -> None:
        self._next, self._consumer, self.drained = number, None, 0

    def read(self, timeout_s: float) -> Sequence[Message]:
        return self._run(self._fetch(timeout_s))

    def close(self) -> None:
        if self._loop is None:
            return
        if self._connection is not None:
            self._loop.run_until_complete(self._connection.close())
        self._loop.close()
        self._loop = self._connection = self._consumer = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        import asyncio  # slow to load

        self._loop = self._loop or asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(work)
        except PenstockError:
            raise
        except (OSError, self._nats.errors.Error) as error:
            cause = self._causes.pop() if self._causes and not ERRORS.is_final(error) else error
            if self._created is not None and isinstance(cause, self._nats.js.errors.NotFoundError):
                # A server that lost its volume: the stream that is created there ends the run, as another one.
                raise OSError(f"{cause.description or cause}; it was there before") from error
            raise ERRORS.converted(cause, self.description, OSError) from error

    async def _connect(self) -> Any:
        if self._connection is None or self._connection.is_closed:
            failed: list[Exception] = []

            async def report(error: Exception) -> None:
                failed.append(error)
                if ERRORS.is_final(error):  # a refusal of a subject: the request itself only gets no answer
                    self._causes.append(error)

            self._consumer = None
            try:
                self._connection = await self._nats.connect(
                    self._server,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=_RETRY_S,
                    connect_timeout=_TIMEOUT_S,
                    error_cb=report,
                )
            except self._nats.errors.NoServersError as error:
                raise (failed[-1] if failed else error) from error
            if self._server.startswith("tls://") and not self._server_has("tls_required"):
                raise OSError("wrong version number: the server answers without TLS")
        return self._connection.jetstream(timeout=_TIMEOUT_S)

    def _server_has(self, feature: str) -> bool:
        """Return whether the server has announced a feature; True if the client does not say."""
        announced = getattr(self._connection, "_server_info", None)
        return announced is None or bool(announced.get(feature))

    async def _creation(self) -> str:
        return f"created {(await self._info()).created.isoformat()}"

    async def _info(self) -> Any:
        stream = await self._connect()
        try:
            return await stream.stream_info(self._stream)
        except self._nats.js.errors.ServiceUnavailableError as error:
            if error.err_code is None and not self._server_has("jetstream"):
                raise OSError("JetStream not enabled") from error
            raise

    async def _retained_range(self) -> RetainedRange:
        state = (await self._info()).state
        return RetainedRange(max(state.first_seq, 1), state.last_seq)

    async def _fetch(self, timeout_s: float) -> list[Message]:
        stream = await self._connect()
        api = self._nats.js.api
        if self._consumer is None:
            self._consumer = await stream.pull_subscribe(
                "",
                stream=self._stream,
                config=api.ConsumerConfig(
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=self._next,
                    ack_policy=api.AckPolicy.NONE,
                    inactive_threshold=_IDLE_S,
                ),
            )
            # The consumer is of the stream that was there then, and goes with it.
            if self._created is not None and await self._creation() != self._created:
                self._consumer = None
                raise OSError("the stream was deleted and created again")
        try:
            messages = await self._consumer.fetch(BATCH, timeout=max(timeout_s, _SHORTEST_S))
        except self._nats.errors.TimeoutError:
            if self._connection.is_closed:
                raise
            try:
                last = (await self._retained_range()).last
                # Raises where the server has lost the consumer, or has left.
                if (await self._consumer.consumer_info()).num_pending == 0:
                    self.drained = last
            except self._nats.js.errors.NotFoundError:
                self._consumer = None
            return []
        received = []
        for message in messages:
            number = message.metadata.sequence.stream
            if number >= self._next:
                received.append(Message(number, message.data or None))
                self._next = number + 1
        return received
