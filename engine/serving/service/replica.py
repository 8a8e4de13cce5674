"""``penstock serve --replica``: a Flight service of shared files, which a follower writes. It takes no gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

import penstock
from penstock.base.errors import ServiceError, UsageError, listed
from penstock.base.events import report
from penstock.core.freshness import ROW
from penstock.model.version import Version
from penstock.rows.shared.header import TableLayout
from penstock.serving.flight.connection import Address
from penstock.serving.flight.messages import LOOKUP, TABLE, decoded, encoded, path_of
from penstock.serving.service.auth import ADMISSION, Certificates, Right, Tokens
from penstock.serving.service.flight_server import AnsweringServer, answered
from penstock.serving.service.limits import Limits
from penstock.serving.service.listener import Listener
from penstock.serving.service.lookup_streams import (
    OTHER_TABLES,
    LookupAnswers,
    LookupCounts,
    ReplicaRows,
    request_schema,
)
from penstock.serving.service.snapshots import BLOCK_BYTES, PASSES, Messages
from penstock.serving.service.subscriptions import Answer
from penstock.serving.shared.table_reader import Reader

ACTIONS = {"status": "which rows the replica has, as JSON", "drain": 'end; {"wait": true} answers with the status'}
READS_ONLY = "a replica takes no gradients: push them to the service that it follows"


class ReplicaServer(AnsweringServer):
    """The Flight server of a replica: lookups, schemas of the tables, and its status."""

    actions = ACTIONS
    _service: ReplicaService

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context, Right.READ):
            if path_of(descriptor) != [LOOKUP]:
                raise UsageError(f"exchange: expected the path {LOOKUP}; {READS_ONLY}")
            self._service.lookups().answer_all(reader, writer, context.get_middleware(ADMISSION))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._serving(context):
            raise UsageError(f"put: expected no frames; {READS_ONLY}")

    def do_get(self, context: Any, ticket: Any) -> flight.FlightDataStream:
        with self._serving(context, Right.READ):
            request = decoded(ticket.ticket, "the ticket")
            if request.keys() != {TABLE}:
                got = ", ".join(map(str, request)) or "nothing"
                raise UsageError(f"the ticket: expected table, got {got}; the followed service has deltas")
            layout = self._layout(request[TABLE])
            schema = schema_of(layout)
            return flight.GeneratorStream(schema, answered(Answer(schema, self._read(layout, schema))))

    def _read(self, layout: TableLayout, schema: pa.Schema) -> Messages:
        """Yield all rows of a table, again if a transaction changed them meanwhile, then their version."""
        reader, at_once = self._service.rows.reader, max(1, BLOCK_BYTES // (4 * layout.dim))
        for number in range(PASSES):
            if number and layout.keys is not None:
                yield schema.empty_table().to_batches()[0], encoded({"changed": True, "full_copy": True})
            version, versions = reader.version, set[Version]()
            self._check_same(layout)
            ids = np.arange(layout.num_rows) if layout.keys is None else reader.keys(layout.name)
            for first in range(0, max(1, len(ids)), at_once):  # one, at least, for the step of the keys
                block = ids[first : first + at_once]
                rows = reader.lookup({layout.name: block}, consistent=True)
                self._check_same(layout)
                values = pa.FixedSizeListArray.from_arrays(pa.array(rows[layout.name].reshape(-1)), layout.dim)
                versions.add(rows.version)
                batch = pa.RecordBatch.from_arrays([pa.array(block), values], schema=schema)
                yield batch, encoded({"changed": number > 0})
            if versions == {version}:
                yield pa.RecordBatch.from_pylist([], schema), encoded({"version": str(version), "clock": None})
                return
        raise UsageError(f"table '{layout.name}': it has changed during each of {PASSES} readings; follow the service")

    def _check_same(self, layout: TableLayout) -> None:
        """Raise ServiceError if a table has other columns or ids by now: the followed service has changed it."""
        now = {each.name: each for each in self._service.rows.reader.layouts}.get(layout.name)
        if now is None or schema_of(now) != schema_of(layout) or (now.keys is None and now.num_rows != layout.num_rows):
            raise ServiceError(OTHER_TABLES)

    def _act(self, kind: str, body: Any) -> dict[str, Any]:
        if kind == "status":
            return self._service.status()
        if kind == "drain":
            self._service.wants_to_end.set()
            return {"ending": True, "error": None, **self._service.status()}
        raise UsageError(f"action '{kind}': expected one of {', '.join(ACTIONS)}; {READS_ONLY}")

    def _paths(self) -> Iterable[tuple[str, ...]]:
        return ((LOOKUP,), *((TABLE, name) for name in self._service.rows.dims))

    def _flight(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        path = path_of(descriptor)
        if path == [LOOKUP]:
            return flight.FlightInfo(request_schema(self._service.rows.dims), descriptor, [], -1, -1)
        if path is None or len(path) != 2 or path[0] != TABLE:
            raise UsageError(f"no flight {'/'.join(path or ())}: expected {LOOKUP} or {TABLE}/NAME; {READS_ONLY}")
        endpoint = flight.FlightEndpoint(encoded({TABLE: path[1]}), [])
        return flight.FlightInfo(schema_of(self._layout(path[1])), descriptor, [endpoint], -1, -1)

    def _layout(self, name: Any) -> TableLayout:
        """Return where a table lies. Raises UsageError for an unknown one."""
        layouts = {layout.name: layout for layout in self._service.rows.reader.layouts}
        if not isinstance(name, str) or name not in layouts:
            raise UsageError(f"no table '{name}' in the replica ({listed(layouts)})")
        return layouts[name]


def schema_of(layout: TableLayout) -> pa.Schema:
    """Return the schema of a table's rows."""
    fields = [("id", pa.type_for_alias(layout.id_type)), ("row", pa.list_(pa.float32(), layout.dim))]
    metadata = {"penstock.table": layout.name}
    if layout.keys is not None:
        metadata["penstock.key_type"] = layout.id_type
    return pa.schema(fields, metadata)


class ReplicaService:
    """A replica that listens once it is constructed. Arguments as of Service.

    reader : of the files; wants_to_end : set when a caller requests the end; then call ``close``
    renew : as of a Listener
    """

    def __init__(
        self,
        reader: Reader,
        address: Address,
        *,
        limits: Limits | None = None,
        tls: Certificates | None = None,
        tokens: Tokens = MappingProxyType({}),
    ) -> None:
        limits = limits or Limits()
        self.wants_to_end = threading.Event()
        self.rows, self._lookup_counts = ReplicaRows(reader), LookupCounts()
        self.lookups: Callable[[], LookupAnswers] = partial(LookupAnswers, self.rows, limits, self._lookup_counts)
        self._started_s = time.monotonic()
        self._listener = Listener(address, tokens, limits, tls or [], partial(ReplicaServer, self))
        self._listener.listen()
        self.address, self.renew = self._listener.address, self._listener.renew
        report("listening", address=self.address.uri, step=reader.version.step)

    def close(self, grace_s: float) -> bool:
        """End all lookups, and stop listening, as ``Listener.close`` does."""
        report("ending", step=self.rows.reader.version.step)
        self.rows.is_ending = True
        return self._listener.close(grace_s)

    def status(self) -> dict[str, Any]:
        """Return the status as plain data, for JSON."""
        reader = self.rows.reader
        version, frame_time = reader.version, reader.frame_time
        return {
            "service": "replica",
            "state": "draining" if self.wants_to_end.is_set() or self.rows.is_ending else "serving",
            "penstock": penstock.__version__,
            "global_step": version.step,
            "committed_step": reader.durable_step,
            "frame_times": {} if frame_time is None else {ROW: frame_time},
            "version": str(version),
            "tables": list(reader.tables),
            **self._listener.counts(),
            **self._lookup_counts.as_dict(),
            "seconds": time.monotonic() - self._started_s,
        }
