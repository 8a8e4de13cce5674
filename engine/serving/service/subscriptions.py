"""The service's answers to readers: tables, deltas. A slow reader delays no other, and keeps one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.api.engine import Engine
from penstock.base.errors import UsageError
from penstock.io.delta_format import DeltaEncoder
from penstock.model.row_encodings import FLOAT32, encoding_of
from penstock.model.version import Version
from penstock.serving.flight.messages import DELTAS, ROWS, START, TABLE, VERSION
from penstock.serving.service.delta_log import DeltaLog
from penstock.serving.service.sequencer import Sequencer
from penstock.serving.service.snapshots import Messages, TableSnapshots


class Answer(NamedTuple):
    """A stream of batches with their app_metadata, if any, read lazily."""

    schema: pa.Schema
    messages: Messages


class Readers:
    """Answers the requests of readers."""

    def __init__(self, engine: Engine, sequencer: Sequencer, log: DeltaLog) -> None:
        self._engine, self._sequencer, self.log = engine, sequencer, log
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
            raise UsageError("the ticket: expected no ids; look up rows with DoExchange, path lookup (docs/serve.md)")
        rows = encoding_of(request.get(ROWS, FLOAT32.name))
        return Answer(self.snapshots.schema(name, rows), self.snapshots.read(name, rows))

    @property
    def delta_schema(self) -> pa.Schema:
        """Return the schema of deltas, with a version of their epoch: all retained ones are of the current one."""
        return self._versioned(self.log.form.schema)

    def _versioned(self, schema: pa.Schema) -> pa.Schema:
        return _with(schema, VERSION, self._sequencer.streams.lineage.ahead(self.log.step))

    def _deltas(self, request: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Answer:
        text, follow = request.get("since"), request.get("follow", False)
        encoder = DeltaEncoder(self.log.form, encoding_of(request.get(ROWS, FLOAT32.name)))
        version, lineage = None if text is None else Version(text), self._sequencer.streams.lineage
        self.log.publish_all()
        if version is not None and version.lineage:
            lineage.check(version)
        since = self.log.first_step if version is None else version.step
        until = None if follow else self.log.step
        self.log.check(since)
        schema = _with(self._versioned(encoder.schema), START, lineage.at(since))
        return Answer(schema, self._published(since, until, is_cancelled, encoder))

    def _published(
        self, since: int, until: int | None, is_cancelled: Callable[[], bool], encoder: DeltaEncoder
    ) -> Messages:
        with self.log.followed() if until is None else nullcontext():
            for delta in self.log.after(since, until, is_cancelled):
                for batch in encoder.encoded(delta.batches):
                    yield batch, b""


def _with(schema: pa.Schema, key: bytes, version: Version) -> pa.Schema:
    """Return a schema with a version in its metadata."""
    return schema.with_metadata({**(schema.metadata or {}), key: str(version)})
