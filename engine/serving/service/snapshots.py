"""A whole table for a reader, at a single step that no crash undoes. It is not copied, and the steps do not pause.

The table is read in blocks between steps, followed by the rows that changed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.api.engine import Engine
from penstock.base.errors import DeltasGoneError, UsageError
from penstock.base.validation import INT64_MAX
from penstock.io.list_columns import list_column, row_type, row_values
from penstock.model.frames import Int64
from penstock.model.row_encodings import FLOAT32, ROWS_KEY, RowEncoding
from penstock.serving.flight.messages import encoded
from penstock.serving.service.delta_log import DeltaLog
from penstock.serving.service.sequencer import Sequencer

BLOCK_BYTES = 4 << 20
# How often a table is read that changes faster than its deltas are retained, before its reader gets an error.
PASSES = 3
Messages = Iterator[tuple[pa.RecordBatch, bytes]]


class TableSnapshots:
    """Reads the tables of an engine."""

    def __init__(self, engine: Engine, sequencer: Sequencer, log: DeltaLog) -> None:
        self._engine, self._sequencer, self._log = engine, sequencer, log

    def schema(self, name: str, rows: RowEncoding = FLOAT32) -> pa.Schema:
        """Return the schema of a table's rows: null for a key of a dynamic table that has lost its row.

        Raises UsageError for an unknown table.
        """
        dim = self._engine.core.tables.table(name).layout.dim
        dynamic = self._engine.core.tables.dynamic.get(name)
        spec = self._engine.config.at_step(INT64_MAX).table(name)  # an optimizer that it gets later may not be lazy
        id_type = spec.id_type
        fields = [
            pa.field("id", pa.type_for_alias(id_type), nullable=False),
            pa.field("row", row_type([dim], rows), nullable=dynamic is not None),
        ]
        metadata = {"penstock.table": name}
        if rows is not FLOAT32:
            metadata[ROWS_KEY.decode()] = rows.name
        if dynamic is None:
            metadata["penstock.vocabulary_size"] = str(spec.vocabulary_size)
            if not spec.rule.non_lazy:
                metadata["penstock.changes_alone"] = "true"
        else:
            metadata["penstock.key_type"] = id_type
            metadata["penstock.absent"] = json.dumps(dynamic.absent)
            fields += [pa.field("last", pa.int64())] if self._log.last else []
        if not spec.trainable:
            metadata["penstock.frozen"] = "true"
        if spec.tag is not None:
            metadata["penstock.learning_rate_tag"] = str(spec.tag)
            if (rate := self._sequencer.rates.given.get(spec.tag)) is not None:
                metadata["penstock.learning_rate"] = repr(rate)
        return pa.schema(fields, metadata=metadata)

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a table; of a dynamic one, those in use."""
        dynamic = self._engine.core.tables.dynamic.get(name)
        return self._engine.core.tables.specs[name].vocabulary_size if dynamic is None else len(dynamic.directory)

    def read(self, name: str, rows: RowEncoding = FLOAT32) -> Messages:
        """Yield all rows, again if too much changed meanwhile, then their version."""
        if rows is FLOAT32:
            yield from self._read(name)
            return
        schema = self.schema(name, rows)
        for batch, metadata in self._read(name):
            yield _encoded(batch, schema, rows), metadata

    def _read(self, name: str) -> Messages:
        schema = self.schema(name)
        for number in range(PASSES):
            before = self._log.created_bytes
            try:
                if number and name in self._engine.core.tables.dynamic:  # keys may have gone that no delta lists
                    yield schema.empty_table().to_batches()[0], encoded({"changed": True, "full_copy": True})
                end = yield from self._pass(name, schema, again=number > 0)
                break
            except DeltasGoneError:
                created = self._log.created_bytes - before
        else:
            raise UsageError(
                f"table '{name}': {created:,} bytes of deltas were made while it was read, and "
                f"{self._log.max_bytes:,} are kept: start the service with a larger --delta-memory"
            )
        yield pa.RecordBatch.from_pylist([], schema), encoded(end)

    # ---- inside

    def _pass(
        self, name: str, schema: pa.Schema, again: bool
    ) -> Generator[tuple[pa.RecordBatch, bytes], None, dict[str, Any]]:
        """Yield blocks, then the rows that changed while they were read.

        Returns the version of all rows, and of a dynamic table the clock. Raises DeltasGoneError if the deltas
        since the first block are no longer retained.
        """
        tables = self._engine.core.tables
        dynamic, end = tables.dynamic.get(name), dict[str, Any]()
        at_once = max(1, BLOCK_BYTES // (4 * tables.table(name).layout.dim))
        with self._engine.gate.still():
            self._engine.core.failure.check_whole()
            since, step = self._log.publish_all(), self._engine.global_step
            if dynamic is None:
                ids: Int64 | range = range(tables.specs[name].vocabulary_size)
            else:
                ids, end["clock"] = dynamic.directory.state()["key"], dynamic.directory.clock
        for first in range(0, len(ids), at_once):
            block_ids = ids[first : first + at_once]
            with self._engine.gate.still():
                self._engine.core.failure.check_whole()
                step = self._engine.global_step
                block = self._block(
                    name,
                    schema,
                    np.arange(block_ids.start, block_ids.stop) if isinstance(block_ids, range) else block_ids,
                )
            yield block, encoded({"changed": again})
        self._settle(step)
        until = self._log.step
        end["version"] = str(self._sequencer.streams.lineage.at(until))
        for delta in self._log.after(since, until, lambda: False):
            for batch in delta.batches:
                changed = _of_table(batch, name)
                if changed.num_rows:
                    yield _as_rows(changed, schema), encoded({"changed": True})
                    end |= {"clock": changed["clock"][0].as_py()} if dynamic is not None else {}
        return end

    def _settle(self, step: int) -> None:
        """Wait until the deltas up to the step of the last block are published, and durable with a checkpoint."""
        if self._sequencer.streams.is_durable:
            if self._log.step < step:
                self._sequencer.ask_for_commit()
                self._log.wait_for(step)
        else:
            self._log.publish_all()

    def _block(self, name: str, schema: pa.Schema, ids: Int64) -> pa.RecordBatch:
        """Return the current rows of ids, of a dynamic table those that have one, expired or not."""
        tables, columns = self._engine.core.tables, list[pa.Array]()
        dynamic = tables.dynamic.get(name)
        if dynamic is None:
            rows, external_ids = ids, ids
        else:
            records = dynamic.directory.records(ids, expired=True)
            present = records["row"] >= 0
            rows, external_ids = records["row"][present].astype(np.int64), dynamic.as_given(ids[present])
            columns = [pa.array(records["last"][present])] if "last" in schema.names else []
        values = tables.table(name).read(rows)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        return pa.RecordBatch.from_arrays([pa.array(external_ids), lists, *columns], schema=schema)


def _encoded(batch: pa.RecordBatch, schema: pa.Schema, rows: RowEncoding) -> pa.RecordBatch:
    """Return a batch of rows with the schema of encoded ones."""
    column = batch["row"]
    values = rows.encode(row_values(column, column.type.list_size))
    null = np.asarray(column.is_null()) if column.null_count else None
    encoded = list_column(values, schema.field("row").type, null=null)
    columns = [encoded if name == "row" else batch[name] for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _of_table(delta: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Return the rows of one table in a delta."""
    tables = delta.column("table")
    index = tables.dictionary.to_pylist().index(name)
    return delta.filter(pc.equal(tables.indices, index))


def _as_rows(delta: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of one table in a delta with the schema of its rows."""
    return pa.RecordBatch.from_arrays([delta.column(field.name).cast(field.type) for field in schema], schema=schema)
