"""Deltas of an engine's tables: which rows changed, since which step, and how they are read.

Deltas observe the engine's core before and after every change. They read rows from the devices lazily, batch by batch.
If a table is about to change before a delta is consumed, they read the rest of that delta first. So a delta is always a
consistent snapshot, and it takes memory only if other producers push too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.base.errors import ConfigError, UsageError
from penstock.base.validation import INT64_MAX, whole
from penstock.checkpoint.dirty_rows import TouchedKeys, TouchedRows
from penstock.core.engine_core import EngineCore
from penstock.core.freshness import DELTA
from penstock.core.observers import ALL_UNSEEN, EVERY_STEP, Pushed, StepObserver, Stepped, Unseen
from penstock.io.delta_format import DeltaBlock, DeltaForm, KeyChanges, Piece, Shape, checksum_begin
from penstock.model.command_options import RunOptions, options_of
from penstock.model.frames import Int64
from penstock.model.options import DeltaOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.model.config.specs import TableSpec


def check_no_deltas(options: RunOptions) -> None:
    """Raise UsageError for an option of a run without deltas that sets their contents."""
    for name in options_of("run", DeltaOptions):
        if getattr(options, name) != getattr(RunOptions, name):
            raise UsageError(f"{name}: sets what deltas hold; give deltas= too")


def form_of(specs: Iterable[TableSpec], options: DeltaOptions) -> DeltaForm:
    """Return the form of the deltas of some tables.

    Raises ConfigError for int64 and uint64 keys together, UsageError for slots, or ``last``, that no table has.
    """
    specs = tuple(specs)
    shapes = {spec.name: Shape(spec.dim, spec.slot_dims) for spec in specs}
    key_types = {None if spec.dynamic is None else spec.dynamic.key_type: spec.name for spec in specs}
    if key_types.keys() >= {"int64", "uint64"}:
        raise ConfigError(
            f"table '{key_types['int64']}' has int64 keys and table '{key_types['uint64']}' has uint64 keys, but "
            "deltas have one column for both; give them one key_type, or run them apart"
        )
    is_dynamic = key_types.keys() != {None}
    if options.last and not is_dynamic:
        raise UsageError("last: no table is dynamic, and only the keys of dynamic tables have it")
    return DeltaForm(
        shapes,
        options.slots,
        op=options.op or is_dynamic,
        numbered=options.numbered,
        dynamic=is_dynamic,
        unsigned="uint64" in key_types,
        last=options.last,
    )


class Deltas(StepObserver):
    """A stream of the changes in an engine's tables, from its creation on.

    The core keeps only a weak reference: a stream without a reader costs nothing. One thread consumes; any may push.

    is_published : whether readers have a delta as soon as it is made; else who publishes it notes that
    """

    needs_all_rows = True

    def __init__(self, core: EngineCore, options: DeltaOptions, is_published: bool = True) -> None:
        specs = core.tables.specs
        self._core, self._is_published = core, is_published
        self._dynamic = core.tables.dynamic
        self._form = form_of(core.config.at_step(INT64_MAX).tables, options)
        self._rows = None if options.per_rows is None else whole("per_rows", options.per_rows, 1)
        self._seconds = None if options.per_seconds is None else _positive("per_seconds", options.per_seconds)
        self._steps = None if options.per_steps is None else whole("per_steps", options.per_steps, 1)
        if self._steps is self._rows is self._seconds is None:
            self._steps = 1
        self._touched: dict[str, TouchedRows | TouchedKeys] = {
            name: TouchedKeys() if name in self._dynamic else TouchedRows(core.tables.held.num_rows(name))
            for name in specs
        }
        self._delta: DeltaInProgress | None = None  # being consumed
        with core.gate.still():
            self._parent, self._emitted_step, self._emitted_s = core.changed_step, core.global_step, time.monotonic()
            core.freshness.forget(DELTA)
            core.observe(self)

    @property
    def form(self) -> DeltaForm:
        return self._form

    @property
    def schema(self) -> pa.Schema:
        return self._form.schema

    @property
    def fully_consumed(self) -> bool:
        """Whether every change was emitted and acknowledged, by the consumer's request for the next batch."""
        return not self.num_touched and self._delta is None

    @property
    def num_touched(self) -> int:
        """Rows that changed since the last delta began; a row that two steps touched may count twice."""
        return sum(touched.num_ids for touched in self._touched.values())

    @property
    def num_changes(self) -> int:
        """Row changes since the last delta began; a row that two steps touched counts twice."""
        return sum(touched.num_changes for touched in self._touched.values())

    def due(self) -> Iterator[pa.RecordBatch]:
        """Return the batches of the next delta if an interval is over; else none."""
        return self.take() if self._is_over() else iter(())

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a delta of everything that changed since the last one; none if nothing did.

        If the last delta was not consumed to its end, yield its remaining batches instead.
        """
        with self._core.gate.still():
            if self._delta is None:
                self._emit()
            batch = self._next()
        while batch is not None:
            yield batch
            with self._core.gate.still():
                batch = self._next()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield everything that was not emitted yet, whether or not it is due."""
        if self._delta is not None:
            yield from self.take()
        yield from self.take()

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch of the current delta; None if it is over, or there is none.

        The caller holds the gate's lock, as for every access to the delta: while a step reads the last batches
        (``before_step``), they are for a moment neither waiting nor ready, and the delta looks finished.
        """
        if self._delta is None:
            return None
        if self._delta.is_over:
            self._delta = None
            return None
        self._core.failure.check_whole()
        return self._delta.next()

    def _emit(self) -> None:
        """End the interval, and begin a delta if anything changed. The caller holds the gate's lock."""
        self._emitted_step, self._emitted_s = self._core.global_step, time.monotonic()
        if blocks := self._take_blocks():
            parent, self._parent = self._parent, self._core.changed_step
            self._delta = DeltaInProgress(self._form, blocks, self._read, self._parent, parent)
            if self._is_published:
                self._core.freshness.begins(DELTA)
                self._core.freshness.ends(DELTA)

    def _take_blocks(self) -> list[DeltaBlock]:
        """Return the touched rows of every table, and reset them."""
        blocks = []
        for name, touched in self._touched.items():
            if isinstance(touched, TouchedKeys):
                blocks += self._take_keys(name, touched)
            elif touched.num_ids:
                rows, held = touched.take(), self._core.tables.held
                ids = held.all_ids(name) if isinstance(rows, range) else held.ids(name, rows)
                blocks.append(DeltaBlock(name, ids))
        return blocks

    def _take_keys(self, name: str, touched: TouchedKeys) -> list[DeltaBlock]:
        """Return the keys that changed, ascending. Those without a row are deletes, also of keys that got and lost it
        meanwhile: a consumer may have read the tables in between."""
        table, keys = self._dynamic[name], touched.take()
        absent = table.directory.rows(keys, expired=True) < 0
        order = np.argsort(table.as_given(keys))
        keys, absent = keys[order], absent[order]
        # Not later, with the rows: a plan of the next step is made before they are read, and stamps its keys.
        last = table.directory.records(keys, expired=True)["last"] if self._form.last else None
        return [DeltaBlock(name, keys, KeyChanges(absent, table.directory.clock, last))] if len(keys) else []

    # ---- StepObserver

    def most_unseen(self) -> Unseen:
        """Return the steps and changes up to the next delta."""
        if self._delta is not None or self._seconds == 0:
            return EVERY_STEP
        steps, changes = ALL_UNSEEN
        if self._steps is not None:
            steps = (self._emitted_step // self._steps + 1) * self._steps - self._core.global_step
        if self._rows is not None:
            changes = self._rows - self.num_changes
        return Unseen(steps, changes)

    def before_step(self, coalesced: Stepped) -> None:
        self.before_load()

    def before_load(self) -> None:
        """Read the rest of the current delta, before rows change."""
        if self._delta is not None:
            self._delta.materialize()

    def pushed(self, pushed: Pushed) -> None:
        for name, parts in pushed.changed.items():
            touched = self._touched[name]
            if isinstance(touched, TouchedKeys):
                touched.add(self._dynamic[name].changes(self._form.last))
                continue
            if self._core.tables.specs[name].rule.non_lazy:
                touched.add_all()
            for rows in parts:
                touched.add(rows.ids)

    def loaded(self, name: str, ids: Int64 | None) -> None:
        touched = self._touched[name]
        if isinstance(touched, TouchedKeys):
            touched.add(self._dynamic[name].changes(self._form.last))
        elif ids is None:
            touched.add_all()
        else:
            touched.add(ids)

    def _is_over(self) -> bool:
        """Return whether a delta is due. Steps count from 0, so that a resumed run ends deltas at the same steps."""
        step = self._core.global_step
        return (
            (self._steps is not None and step // self._steps > self._emitted_step // self._steps)
            or (self._rows is not None and self.num_changes >= self._rows)
            or (self._seconds is not None and time.monotonic() - self._emitted_s >= self._seconds)
        )

    def _read(self, block: DeltaBlock) -> Piece:
        table, ids = self._core.tables.table(block.table), ids_of(block)
        if block.keys is None:
            rows = self._core.tables.held.local_rows(block.table, ids)
        else:
            present = ids[~block.keys.deleted]
            rows = self._dynamic[block.table].directory.rows(present, expired=True).astype(np.int64)
        values = {column: table.read(rows, part) for column, part in self._columns(block.table).items()}
        return Piece(block.table, ids, values, block.keys)

    def _columns(self, table: str) -> dict[str, int]:
        """Return the columns that the deltas of a table contain: column → part."""
        parts = self._core.tables.parts(table)
        return {"row": 0, **{slot: parts[slot] for slot in self._form.slots_of(table) if slot in parts}}


def ids_of(block: DeltaBlock) -> Int64:
    return np.arange(block.ids.start, block.ids.stop, block.ids.step) if isinstance(block.ids, range) else block.ids


class DeltaInProgress:
    """One delta, consumed batch by batch.

    read : returns the current rows of a block
    """

    def __init__(
        self, form: DeltaForm, blocks: Sequence[DeltaBlock], read: Callable[[DeltaBlock], Piece], step: int, parent: int
    ) -> None:
        self._form, self._read, self._step, self._parent = form, read, step, parent
        self._waiting = deque(form.split(blocks))
        self._ready: deque[pa.RecordBatch] = deque()
        self._rows_left = sum(len(block.ids) for block in blocks)
        self._checksum = checksum_begin(step, parent)

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._ready

    def next(self) -> pa.RecordBatch:
        """Return the next batch. The delta must not be over."""
        return self._ready.popleft() if self._ready else self._make()

    def materialize(self) -> None:
        """Read the batches that were not consumed yet into memory."""
        while self._waiting:
            self._ready.append(self._make())

    def _make(self) -> pa.RecordBatch:
        pieces = [self._read(block) for block in self._waiting[0]]
        self._waiting.popleft()  # only now: after a failed read the blocks are still waiting
        self._rows_left -= sum(len(piece.ids) for piece in pieces)
        self._checksum = self._form.checksum(self._checksum, pieces)
        return self._form.batch(pieces, self._step, self._parent, self._checksum, self._rows_left)


def _positive(name: str, seconds: Any) -> float:
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: expected a number of seconds, got {seconds!r}") from None
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}: expected a number of seconds that is not negative, got {seconds}")
    return value
