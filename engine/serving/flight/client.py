"""A client of ``penstock serve``: gradients in, deltas, tables and rows out, over connections that may break.

    with connect("grpc://127.0.0.1:8815", token=…) as service:
        done = service.position("worker-0")  # after a restart of the trainer; else 0
        service.put(frames[done:], "worker-0", first=done + 1)
        for delta in service.deltas(since=version, follow=True): …

After a failure the client reconnects for ``patience_s`` and resumes after the last acknowledged frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn, overload

import pyarrow as pa
import pyarrow.flight as flight

from penstock.base.errors import ServiceError, UsageError, UsageTypeError
from penstock.base.limited_calls import interruptible
from penstock.io.patience import Patience
from penstock.model.frames import Float32
from penstock.model.row_encodings import FLOAT32, RowEncoding, encoding_of
from penstock.model.version import LookupResult, Version
from penstock.serving.flight.answers import Delta, Status, TableAt, check_encoding, deltas_of, table_of
from penstock.serving.flight.connection import Address, Connection, Roots
from penstock.serving.flight.lookup_client import LookupRequest, LookupStream
from penstock.serving.flight.messages import DELTAS, DIMS, LOOKUP, ROWS, START, TABLE, Ack
from penstock.serving.flight.producer import WINDOW_BYTES, Producer
from penstock.serving.flight.put_frames import ArrowStream, Frame, frames_of


def connect(uri: str, token: str | None = None, *, roots: Roots = None, patience_s: float = 30.0) -> Client:
    """Return a client of a service. Only the first call connects.

    Parameters
    ----------
    uri : str
        ``grpc://HOST:PORT`` or ``grpc+tls://HOST:PORT``.
    token : str or None
        None: PENSTOCK_FLIGHT_TOKEN of the environment, if set; "": send no token. White space around it is stripped.
    roots : str, path, bytes or None
        The certificates to trust: a PEM file, or PEM as bytes. None: PENSTOCK_FLIGHT_ROOTS, else the system's.
    patience_s : float
        Seconds to retry while the service is unreachable. A wrong certificate or token is not retried.

    Returns
    -------
    Client
        A context manager.

    Raises
    ------
    UsageError
        If the address is not of this form, or the token is not ASCII without spaces. The first call raises it for
        certificates that cannot be read, and for such a token of the environment.

    Examples
    --------
    >>> import penstock as ps
    >>> import pyarrow as pa
    >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
    >>> with ps.connect("grpc://127.0.0.1:8815") as service:
    ...     service.put([frame], "worker-0").applied
    ...     service.lookup({"user": [5, 3]})["user"]
    1
    array([[0.75, 0.5 ],
           [0.5 , 0.5 ]], dtype=float32)
    """
    return Client(Connection(Address.of(uri), token, roots, patience_s))


class Client:
    """A client of one service, for one thread at a time; create one client per thread. ``connect`` returns one.

    Parameters
    ----------
    connection : Connection
        The connection, which reconnects after a failure.

    Notes
    -----
    After a failure the client reconnects for ``patience_s`` seconds and resumes after the last acknowledged frame.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lookups: dict[pa.DataType, LookupStream] = {}  # open ones, by the type of their ids

    # ---- gradients in

    def put(
        self,
        frames: Iterable[Frame] | ArrowStream,
        contributor: str,
        *,
        first: int | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> Ack:
        """Push frames and wait until the service has committed them.

        Parameters
        ----------
        frames : iterable of frames, or an Arrow table
            Each frame is a record batch, a table (of pyarrow, polars or anything with ``__arrow_c_stream__``) or a list
            of them; a single table is split into frames where its ``step`` or ``contributor`` changes.
        contributor : str
            The producer's name; the service numbers the frames of each name from 1.
        first : int or None
            The number of the first frame; None: the one after ``position(contributor)``.
        window_bytes : int
            Bytes of frames kept until they are acknowledged; then a commit is requested, and waited for.

        Returns
        -------
        Ack
            The last acknowledgement: what became of these frames (``applied``, ``stale``, ``dropped``).

        Raises
        ------
        InputError
            For a bad frame; earlier ones stay applied.
        ServiceError
            If the service stays unreachable.

        Notes
        -----
        The service recognizes repeated frames only by their numbers. Without ``first``, the same frames count as new
        ones: the gate drops them as stale if their step is behind, and applies them a second time if they have no step.
        A trainer that starts from scratch reads ``position(contributor)``, skips that many frames and passes
        ``first=position + 1``; the service skips frames whose numbers it has already applied.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from penstock.io.flight import connect
        >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     ack = service.put([frame], "worker-0")
        ...     again = service.put([frame], "worker-0", first=1)  # recognized by its number
        >>> ack.position, ack.applied, again.applied
        (1, 1, 0)
        """
        with self.producer(contributor, first=first, window_bytes=window_bytes) as producer:
            for frame in frames_of(frames):
                producer.send(frame)
        return producer.acked

    def producer(self, contributor: str, *, first: int | None = None, window_bytes: int = WINDOW_BYTES) -> Producer:
        """Return a producer for single frames: ``send``, and ``close`` to wait for the last acknowledgement.

        Parameters
        ----------
        contributor : str
            The producer's name.
        first : int or None
            The number of the first frame; None: the one after ``position(contributor)``.
        window_bytes : int
            Bytes of frames kept until they are acknowledged; then a commit is requested, and waited for.

        Returns
        -------
        Producer
            A context manager.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from penstock.io.flight import connect
        >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     with service.producer("worker-0") as producer:
        ...         number = producer.send(frame)
        ...     producer.acked.applied
        1
        """
        return Producer(self.connection, contributor, first, window_bytes)

    def position(self, contributor: str) -> int:
        """Return the number of a producer's durable frames; after a restart, send the next one first.

        Parameters
        ----------
        contributor : str
            The producer's name.

        Returns
        -------
        int

        Examples
        --------
        >>> import pyarrow as pa
        >>> from penstock.io.flight import connect
        >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     ack = service.put([frame], "worker-0")
        ...     service.position("worker-0"), service.position("worker-1")
        (1, 0)
        """
        return int(self.connection.act("position", contributor=contributor)["durable_position"])

    # ---- tables out

    def deltas(self, since: Version | None = None, *, follow: bool = False, rows: str = "float32") -> Iterator[Delta]:
        """Yield the deltas after a version, in order, each once.

        Parameters
        ----------
        since : Version or None
            Of a table, a delta or a lookup; None: all retained deltas. If it only names a step, the service cannot
            check that it still has this step.
        follow : bool
            Continue with later deltas, also over broken connections.
        rows : {"float32", "bfloat16", "int8"}
            How the rows are stored: the column ``row`` has lists of float32, or the bytes of encoded rows
            (docs/formats.md), which the metadata of its schema names.

        Yields
        ------
        Delta

        Raises
        ------
        DeltasGoneError
            If the service no longer retains them, or went back to an earlier step and then took others: fetch the
            tables again.

        Examples
        --------
        >>> import pyarrow as pa
        >>> from penstock.io.flight import connect
        >>> frame = pa.table({"step": [0, 0], "id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     now = service.table("user")
        ...     ack = service.put([frame], "worker-0")
        ...     for delta in service.deltas(now.version):
        ...         print(delta.version.step, delta.batches[0]["id"].to_pylist(), delta.batches[0]["row"].to_pylist())
        1 [3, 5] [[0.5, 0.5], [0.75, 0.5]]
        """
        if not isinstance(since, Version | None):
            raise UsageTypeError(f"since: expected the version of a table, a delta or a lookup, got {since!r}")
        encoding = encoding_of(rows)
        patience = Patience(self.connection.patience_s, starts_over=follow)
        while True:
            try:
                ticket = {"since": None if since is None else str(since), "follow": follow, **_ticket_rows(encoding)}
                reader = self.connection.get({DELTAS: ticket})
                check_encoding(reader.schema, encoding, self.connection.uri)
                # From now on it is checked, even if the caller gave no lineage: the service may go back meanwhile.
                since = Version(reader.schema.metadata[START].decode())
                for delta in deltas_of(reader):
                    since = delta.version
                    patience.good()
                    yield delta
                    self.connection.check_process()
                if not follow:
                    return
                # The service has ended in order, and may be back.
                patience.wait(ServiceError(f"{self.connection.uri}: the service has ended"))
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                patience.wait(self.connection.lost(error))

    def table(self, name: str, *, rows: str = "float32") -> TableAt:
        """Fetch a table, with all rows of one step.

        Parameters
        ----------
        name : str
            The table.
        rows : {"float32", "bfloat16", "int8"}
            How the rows are stored; encoded ones are uint8, shape (…, bytes).

        Returns
        -------
        TableAt

        Examples
        --------
        >>> from penstock.io.flight import connect
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     table = service.table("user")
        >>> table.version.step, table.rows.shape
        (0, (8, 2))
        """
        encoding = encoding_of(rows)

        def fetch() -> TableAt:
            reader = self.connection.get({TABLE: name, **_ticket_rows(encoding)})
            check_encoding(reader.schema, encoding, self.connection.uri)
            return table_of(reader, f"{self.connection.uri}: the table '{name}'")

        return self.connection.retried(lambda: interruptible(fetch, f"the table '{name}'", self.connection.uri))

    @overload
    def lookup(self, table: str, ids: Any, consistent: bool = False, *, timeout_ms: int = 1000) -> Float32: ...

    @overload
    def lookup(self, table: Mapping[str, Any], *, consistent: bool = False, timeout_ms: int = 1000) -> LookupResult: ...

    def lookup(
        self, table: str | Mapping[str, Any], ids: Any = None, consistent: bool = False, *, timeout_ms: int = 1000
    ) -> Float32 | LookupResult:
        """Fetch the current values of rows of one or several tables, in one request.

        Parameters
        ----------
        table : str or mapping of str to array_like of int
            The table; or the ids of several tables.
        ids : array_like of int, shape (n,)
            Of one table; of a dynamic table, keys. Any array or Arrow array; repeats allowed.
        consistent : bool
            Rows of one step, of all tables. Otherwise rows may be of different steps.
        timeout_ms : int
            How long the service may wait for such a step.

        Returns
        -------
        numpy.ndarray or LookupResult
            float32, shape (n, dim); of several tables a dict of such, with the attribute ``version``. An absent key of
            a dynamic table reads what its ``missing`` specifies.

        Raises
        ------
        InputError
            If a table is unknown, or an id outside it; the next lookup may use the same connection.
        ReadTimeoutError
            If there are no rows of one step in time.
        ServiceError
            If the service stays unreachable.

        Notes
        -----
        The first lookup opens a stream, which later ones use, so that one takes a message in each direction.

        Examples
        --------
        >>> import penstock as ps
        >>> with ps.connect("grpc://127.0.0.1:8815") as service:
        ...     looked_up = service.lookup({"user": [5, 5]})
        >>> looked_up["user"]
        array([[1., 1.],
               [1., 1.]], dtype=float32)
        >>> looked_up.version.step
        0
        """
        if isinstance(table, str):
            return self.lookup({table: ids}, consistent=consistent, timeout_ms=timeout_ms)[table]
        request = LookupRequest(table, consistent, timeout_ms)
        return self.connection.retried(lambda: self._looked_up(request))

    def tables(self) -> dict[str, pa.Schema]:
        """Return the schema of each table's rows, in the configuration's order: ``id`` and ``row``.

        Returns
        -------
        dict of str to pyarrow.Schema

        Examples
        --------
        >>> from penstock.io.flight import connect
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     {name: schema.names for name, schema in service.tables().items()}
        {'user': ['id', 'row']}
        """
        with suppress(UsageError):  # a table that went between two requests
            return self.connection.retried(self._tables)
        return self.connection.retried(self._tables)

    # ---- the service itself

    def status(self) -> Status:
        """Return what the service reports of itself: counts, positions, the version of its tables.

        Returns
        -------
        Status
            A dict of plain data (docs/serve.md), with the attribute ``version``.
        """
        return Status(self.connection.act("status"))

    def explain(self) -> str:
        """Return a description of the frames that the gate waits for.

        Returns
        -------
        str

        Examples
        --------
        >>> from penstock.io.flight import connect
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     service.explain()
        '0 of 1 frames in; global step 0'
        """
        return str(self.connection.act("explain")["gate"])

    def checkpoint(self) -> int:
        """Commit and wait for it.

        Returns
        -------
        int
            The step of the commit.
        """
        return int(self.connection.act("checkpoint")["committed_step"])

    def rollback(self, version: str | int) -> dict[str, Any]:
        """Step the service forward to the rows of an earlier commit (docs/versions.md), and wait for its commit.

        Parameters
        ----------
        version : str or int
            A tag of the service's checkpoint, or the step of a commit.

        Returns
        -------
        dict
            ``global_step``, ``to_step`` (that of the version) and ``rolled_back``: frames dropped from the gate.

        Raises
        ------
        StateError
            If there is no such version, it is damaged, or its tables are others.
        UsageError
            If the service has no checkpoint.
        ServiceError
            If the service cannot be reached. If the connection is lost meanwhile, it may have rolled back: see
            ``status()``.
        """
        return self.connection.act_once("rollback", to=version)

    def drain(self) -> None:
        """Let the service take no more frames, commit and end. Returns at once (``penstock drain`` does not)."""
        self.connection.act("drain")

    def close(self) -> None:
        """Close the connection."""
        if self.connection.is_forked:
            return
        for stream in self._lookups.values():
            stream.close()
        self._lookups.clear()
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageTypeError("cannot pickle or copy a Client: connect in the other process, or thread")

    def _looked_up(self, request: LookupRequest) -> LookupResult:
        self.connection.check_process()
        stream = self._lookups.pop(request.id_type, None)
        if stream is None or stream.client is not self.connection.opened()[0]:
            stream = LookupStream(self.connection, request.batch.schema)
        answer = stream.ask(request)
        self._lookups[request.id_type] = stream
        return request.result(*answer, self.connection.uri)

    def _tables(self) -> dict[str, pa.Schema]:
        client, options = self.connection.opened()

        def schema_of(*path: str) -> pa.Schema:
            return client.get_flight_info(flight.FlightDescriptor.for_path(*path), options).schema

        # Not list_flights: if the service ends during it, pyarrow interrupts the main thread as SIGINT does.
        names = json.loads((schema_of(LOOKUP).metadata or {})[DIMS])
        return {name: schema_of(TABLE, name) for name in names}


def _ticket_rows(encoding: RowEncoding) -> dict[str, str]:
    return {} if encoding is FLOAT32 else {ROWS: encoding.name}
