"""The service's answers to readers: tables, rows by id, deltas. A slow reader delays no other, and keeps one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from penstock.errors import UsageError
from penstock.io.flight.messages import DELTAS, TABLE, ReaderPosition, encoded
from penstock.service.delta_log import DeltaLog
from penstock.service.limits import Limits
from penstock.service.sequencer import Sequencer
from penstock.service.snapshots import Messages, TableSnapshots

if TYPE_CHECKING:
    from penstock.engine import Engine


class Answer(NamedTuple):
    """A stream of batches with their app_metadata, if any, read lazily."""

    schema: pa.Schema
    messages: Messages


class Readers:
    """Answers the requests of readers."""

    def __init__(self, engine: Engine, sequencer: Sequencer, log: DeltaLog, limits: Limits) -> None:
        self._engine, self._sequencer, self.log, self._limits = engine, sequencer, log, limits
        self.snapshots = TableSnapshots(engine, sequencer, log)

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
        return Answer(self.snapshots.schema(name), self.snapshots.read(name))

    @property
    def delta_schema(self) -> pa.Schema:
        """Return the schema of deltas, with their lineage and epoch: all retained ones are of the current epoch."""
        lineage = self._sequencer.streams.lineage
        metadata = {"penstock.lineage": lineage.id, "penstock.epoch": lineage.current.id}
        return self.log.schema.with_metadata({**(self.log.schema.metadata or {}), **metadata})

    def _deltas(self, request: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Answer:
        position, follow = ReaderPosition.of(request), request.get("follow", False)
        self.log.publish_all()
        since = self.log.first_step if position.since is None else position.since
        lineage = self._sequencer.streams.lineage
        if position.lineage is not None:
            lineage.check(position.lineage, position.epoch, since)
        until = None if follow else self.log.step
        self.log.check(since)
        start = ReaderPosition(since, lineage.id, lineage.epoch_of(since))
        return Answer(start.added_to(self.delta_schema), self._published(since, until, is_cancelled))

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
        tables = self._engine.core.tables
        valid = tables.valid_ids(name, ids)
        with self._engine.gate.still():
            rows = tables.lookup(name, valid, forward=False)
            lineage, step = self._sequencer.streams.lineage, self._engine.global_step
            epoch = lineage.epoch_of(step)
            metadata = {"step": step, "published_step": self.log.step, "lineage": lineage.id, "epoch": epoch}
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        batch = pa.RecordBatch.from_arrays([pa.array(valid.view(tables.specs[name].id_type)), values], ["id", "row"])
        return Answer(batch.schema, iter([(batch, encoded(metadata))]))
