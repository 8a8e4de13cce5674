"""The service's answers to readers: tables, rows by id, deltas. A slow reader delays no other, and keeps one batch.

A table is read in blocks between steps, followed by the rows that changed meanwhile. The result is the table at a
single step, which no crash undoes, without a copy of the table and without a pause of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DeltasGoneError, UsageError
from penstock.io.flight.messages import DELTAS, TABLE, encoded
from penstock.service.delta_log import DeltaLog
from penstock.service.limits import Limits
from penstock.service.sequencer import Sequencer

if TYPE_CHECKING:
    from penstock.engine import Engine

BLOCK_BYTES = 4 << 20
# How often a table is read that changes faster than its deltas are retained, before its reader gets an error.
PASSES = 3
Messages = Iterator[tuple[pa.RecordBatch, bytes]]


class Answer(NamedTuple):
    """A stream of batches with their app_metadata, if any, read lazily."""

    schema: pa.Schema
    messages: Messages


class Readers:
    """Answers the requests of readers."""

    def __init__(self, engine: Engine, sequencer: Sequencer, log: DeltaLog, limits: Limits) -> None:
        self._engine, self._sequencer, self.log, self._limits = engine, sequencer, log, limits

    def get(self, request: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Answer:
        """Return the answer to a ticket. Raises UsageError and DeltasGoneError.

        is_cancelled : returns whether the reader has disconnected
        """
        if DELTAS in request:
            return self._deltas(request[DELTAS] if isinstance(request[DELTAS], Mapping) else {}, is_cancelled)
        name = request.get(TABLE)
        if not isinstance(name, str):
            raise UsageError(f"the ticket: expected table or deltas, got {', '.join(map(str, request)) or 'nothing'}")
        self._engine.core.tables.table(name)
        if "ids" in request:
            return self._rows(name, request["ids"])
        return Answer(self.table_schema(name), self._table(name))

    def table_schema(self, name: str) -> pa.Schema:
        """Return the schema of a table's rows. Raises UsageError for an unknown table."""
        dim = self._engine.core.tables.table(name).layout.dim
        fields = [pa.field("id", pa.int64(), False), pa.field("row", pa.list_(pa.float32(), dim), False)]
        return pa.schema(fields, metadata={b"penstock.table": name.encode()})

    @property
    def delta_schema(self) -> pa.Schema:
        metadata = {**(self.log.schema.metadata or {}), b"penstock.lineage": self._sequencer.streams.lineage.encode()}
        return self.log.schema.with_metadata(metadata)

    def _deltas(self, request: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Answer:
        since, lineage, follow = request.get("since"), request.get("lineage"), request.get("follow", False)
        if since is not None and type(since) is not int:
            raise UsageError(f"since: expected a step, got {since!r}")
        if lineage is not None and lineage != self._sequencer.streams.lineage:
            raise DeltasGoneError(
                "this service's state is another one than that of the step asked for (it was restarted without its "
                "checkpoint, or with another one); read the tables again, and continue from their step"
            )
        self.log.publish_all()
        since = self.log.first_step if since is None else since
        until = None if follow else self.log.step
        self.log.check(since)
        return Answer(self.delta_schema, self._published(since, until, is_cancelled))

    def _published(self, since: int, until: int | None, is_cancelled: Callable[[], bool]) -> Messages:
        with self.log.followed() if until is None else nullcontext():
            for delta in self.log.after(since, until, is_cancelled):
                for batch in delta.batches:
                    yield batch, b""

    def _rows(self, name: str, ids: Any) -> Answer:
        if isinstance(ids, list) and len(ids) > self._limits.rows_asked:
            raise UsageError(f"ids: {len(ids)} rows in one call; ask for {self._limits.rows_asked} at most")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UsageError("ids: expected a list of whole numbers")
        size = self._engine.core.tables.table(name).layout.vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise UsageError(f"table '{name}': expected 0 <= id < {size}, got ids from {min(ids)} to {max(ids)}")
        with self._engine.gate.still():
            batch = self._batch(name, np.array(ids, np.int64))
            metadata = {"step": self._engine.global_step, "told_step": self.log.step}
        return Answer(batch.schema, iter([(batch, encoded(metadata))]))

    def _table(self, name: str) -> Messages:
        """Yield all rows, again if too much changed meanwhile, then the step that they are of."""
        for number in range(PASSES):
            before = self.log.created_bytes
            try:
                until = yield from self._pass(name, again=number > 0)
                break
            except DeltasGoneError:
                created = self.log.created_bytes - before
        else:
            raise UsageError(
                f"table '{name}': {created:,} bytes of deltas were made while it was read, and {self.log.max_bytes:,} "
                "are kept: start the service with a larger --delta-memory"
            )
        end = {"step": until, "lineage": self._sequencer.streams.lineage}
        yield pa.RecordBatch.from_pylist([], self.table_schema(name)), encoded(end)

    def _pass(self, name: str, again: bool) -> Generator[tuple[pa.RecordBatch, bytes], None, int]:
        """Yield blocks, then the rows that changed while they were read. Return the step that all rows are of.

        Raises DeltasGoneError if the deltas since the first block are no longer retained.
        """
        layout = self._engine.core.tables.table(name).layout
        at_once = max(1, BLOCK_BYTES // (4 * layout.dim))
        since = step = self.log.publish_all()
        for first in range(0, layout.vocabulary_size, at_once):
            with self._engine.gate.still():
                self._engine.core.check_whole()
                step = self._engine.global_step
                block = self._batch(name, np.arange(first, min(first + at_once, layout.vocabulary_size)))
            yield block, encoded({"changed": again})
        self._settle(step)
        until = self.log.step
        for delta in self.log.after(since, until, lambda: False):
            for batch in delta.batches:
                changed = _of_table(batch, name, self.table_schema(name))
                if changed.num_rows:
                    yield changed, encoded({"changed": True})
        return until

    def _settle(self, step: int) -> None:
        """Wait until the deltas up to the step of the last block are published, and durable with a checkpoint."""
        if self._sequencer.streams.is_durable:
            if self.log.step < step:
                self._sequencer.ask_for_commit()
                self.log.wait_for(step)
        else:
            self.log.publish_all()

    def _batch(self, name: str, ids: np.ndarray[Any, np.dtype[np.int64]]) -> pa.RecordBatch:
        rows = self._engine.core.tables.table(name).read(ids)
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        return pa.RecordBatch.from_arrays([pa.array(ids), values], schema=self.table_schema(name))


def _of_table(delta: pa.RecordBatch, name: str, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of one table in a delta, with the schema of that table's batches."""
    tables = delta.column("table")
    place = tables.dictionary.to_pylist().index(name)
    mine = delta.filter(pc.equal(tables.indices, place))
    values = mine.column("row").flatten()
    dim = schema.field("row").type.list_size
    return pa.RecordBatch.from_arrays(
        [mine.column("id"), pa.FixedSizeListArray.from_arrays(values, dim)], schema=schema
    )
