"""A client of ``penstock serve``: gradients in, deltas, tables and rows out, over connections that may break.

    with connect("grpc://127.0.0.1:8815", token=…) as service:
        done = service.position("worker-0")  # after a restart of the trainer; else 0
        service.put(frames[done:], "worker-0", first=done + 1)
        for delta in service.deltas(since=step, follow=True): …

After a failure the client reconnects for ``patience_s`` and resumes after the last acknowledged frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

import penstock.base.interrupts as interrupts
from penstock.base.errors import ServiceError, UsageError
from penstock.io.patience import Patience
from penstock.model.lineage import FIRST_EPOCH
from penstock.serving.flight.connection import Address, Connection, Roots
from penstock.serving.flight.lookup_client import LookupRequest, LookupResult, LookupStream
from penstock.serving.flight.messages import DIMS, LOOKUP, TABLE, Ack, ReaderPosition, decoded
from penstock.serving.flight.producer import WINDOW_BYTES, Producer
from penstock.serving.flight.put_frames import ArrowStream, Frame, frames_of

Float32 = npt.NDArray[np.float32]


class Delta(NamedTuple):
    """One delta of all tables (docs/deltas.md).

    Attributes
    ----------
    since : int
        The step of the previous delta.
    step : int
        The step of this one.
    batches : tuple of pyarrow.RecordBatch
        The changed rows.
    epoch : str
        Of ``step``.
    """

    since: int
    step: int
    batches: tuple[pa.RecordBatch, ...]
    epoch: str = FIRST_EPOCH


class TableAt(NamedTuple):
    """A table at one step.

    Attributes
    ----------
    rows : numpy.ndarray
        float32, shape (vocabulary_size, dim); of a dynamic table (n, dim).
    step : int
        The step of the rows.
    lineage : str
        To be passed with the step to ``Client.deltas``.
    keys : numpy.ndarray or None
        Of a dynamic table, the keys of the rows, ascending: int64 or uint64, shape (n,). Expired keys are among them
        until their sweep.
    last : numpy.ndarray or None
        int64, shape (n,), the clock when each key occurred last, if the service runs with ``--delta-last``.
    clock : int or None
        Of a dynamic table.
    epoch : str
        To be passed with the step to ``Client.deltas``.
    """

    rows: Float32
    step: int
    lineage: str
    keys: npt.NDArray[Any] | None = None
    last: npt.NDArray[np.int64] | None = None
    clock: int | None = None
    epoch: str = FIRST_EPOCH


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
            Bytes of frames kept until they are acknowledged.

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
            Bytes of frames kept until they are acknowledged.

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

    def deltas(
        self, since: int | None = None, *, lineage: str | None = None, epoch: str | None = None, follow: bool = False
    ) -> Iterator[Delta]:
        """Yield the deltas after a step, in order, each once.

        Parameters
        ----------
        since : int or None
            The step; None: all retained deltas.
        lineage : str or None
            Of that step, as ``table`` has it. None: the service cannot check that it still has this step.
        epoch : str or None
            Of that step, as ``table`` and the deltas have it. None: the first epoch of the lineage.
        follow : bool
            Continue with later deltas, also over broken connections.

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
        ...     for delta in service.deltas(now.step, lineage=now.lineage, epoch=now.epoch):
        ...         print(delta.step, delta.batches[0]["id"].to_pylist(), delta.batches[0]["row"].to_pylist())
        1 [3, 5] [[0.5, 0.5], [0.75, 0.5]]
        """
        since = int(since) if isinstance(since, np.integer) else since
        position = ReaderPosition.of({"since": since, "lineage": lineage, "epoch": epoch})
        patience = Patience(self.connection.patience_s, starts_over=follow)
        while True:
            try:
                reader = self.connection.get(position.ticket(follow))
                # From now on it is checked, even if the caller gave no lineage: the service may go back meanwhile.
                position = ReaderPosition.of_stream(reader.schema) or position
                for delta in _deltas(reader):
                    position = position.after(delta.step, delta.epoch)
                    patience.good()
                    yield delta
                    self.connection.check_process()
                if not follow:
                    return
                # The service has ended in order, and may be back.
                patience.wait(ServiceError(f"{self.connection.uri}: the service has ended"))
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                patience.wait(self.connection.lost(error))

    def table(self, name: str) -> TableAt:
        """Fetch a table, with all rows of one step.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        TableAt

        Examples
        --------
        >>> from penstock.io.flight import connect
        >>> with connect("grpc://127.0.0.1:8815") as service:
        ...     table = service.table("user")
        >>> table.step, table.rows.shape
        (0, (8, 2))
        """
        return self.connection.retried(lambda: self._table(name))

    def lookup(self, ids: Mapping[str, Any], consistent: bool = False, *, timeout_ms: int = 1000) -> LookupResult:
        """Fetch the current values of rows of one or several tables, in one request.

        Parameters
        ----------
        ids : mapping of str to array_like of int, shape (n,)
            The ids by table; of a dynamic table, keys. Any array or Arrow array; repeats allowed.
        consistent : bool
            Rows of one step, of all tables. Otherwise rows may be of different steps.
        timeout_ms : int
            How long the service may wait for such a step.

        Returns
        -------
        LookupResult
            A dict of the rows, float32, shape (n, dim), with the attribute ``step``. An absent key of a dynamic table
            reads what its ``missing`` specifies.

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
        >>> looked_up.step
        0
        """
        request = LookupRequest(ids, consistent, timeout_ms)
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

    def status(self) -> dict[str, Any]:
        """Return what the service reports of itself: counts, positions, the step, its lineage.

        Returns
        -------
        dict
            Plain data (docs/serve.md).
        """
        return self.connection.act("status")

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

    def _table(self, name: str) -> TableAt:
        reader = self.connection.get({TABLE: name})
        is_dynamic = b"penstock.key_type" in (reader.schema.metadata or {})
        rows = _Keys(reader.schema) if is_dynamic else _AllIds()
        for chunk in reader:
            interrupts.check()
            metadata = decoded(chunk.app_metadata, "a table's metadata")
            if "step" in metadata:
                return rows.table(metadata)
            rows.add(chunk.data, metadata)
        raise ServiceError(f"{self.connection.uri}: the table '{name}' ended before its last row")


def _deltas(reader: flight.FlightStreamReader) -> Iterator[Delta]:
    """Yield the deltas of a stream, which ends with the generator."""
    try:
        epoch = reader.schema.metadata[b"penstock.epoch"].decode()
        batches: list[pa.RecordBatch] = []
        for chunk in reader:
            batches.append(chunk.data)
            if not chunk.data.column("rows_left")[-1].as_py():
                since, step = (chunk.data.column(name)[0].as_py() for name in ("parent", "step"))
                yield Delta(since, step, tuple(batches), epoch)
                batches = []
    finally:
        reader.cancel()


class _AllIds:
    """The rows of a table with all ids below its vocabulary_size: first each of them, then those that changed."""

    def __init__(self) -> None:
        self._blocks: list[Float32] = []
        self._rows: Float32 | None = None

    def add(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        if not metadata["changed"]:
            self._blocks.append(_matrix(batch))
            return
        self._rows = np.concatenate(self._blocks) if self._rows is None else self._rows
        self._rows[batch.column("id").to_numpy()] = _matrix(batch)

    def table(self, end: dict[str, Any]) -> TableAt:
        rows = np.concatenate(self._blocks) if self._rows is None else self._rows
        return TableAt(rows, end["step"], end["lineage"], epoch=end["epoch"])


class _Keys:
    """The rows of a dynamic table: of each key the last one counts, and a null one removes it."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch, metadata: dict[str, Any]) -> None:
        if metadata.get("full_copy"):
            self._batches.clear()
        self._batches.append(batch)

    def table(self, end: dict[str, Any]) -> TableAt:
        table = pa.Table.from_batches(self._batches, self._schema)
        keys, rows = table["id"].to_numpy(), table["row"]
        keys, from_end = np.unique(keys[::-1], return_index=True)
        newest = table.num_rows - 1 - from_end
        present = np.asarray(rows.is_valid())[newest]
        present_rows = pa.array(newest[present])
        flat: Float32 = rows.take(present_rows).combine_chunks().flatten().to_numpy()
        last = table["last"].take(present_rows).to_numpy() if "last" in table.schema.names else None
        matrix = flat.reshape(-1, rows.type.list_size)
        return TableAt(matrix, end["step"], end["lineage"], keys[present], last, end["clock"], end["epoch"])


def _matrix(batch: pa.RecordBatch) -> Float32:
    """Return the rows of a table's batch: float32 (n, dim)."""
    rows = batch.column("row")
    flat: Float32 = rows.flatten().to_numpy()
    return flat.reshape(-1, rows.type.list_size)
