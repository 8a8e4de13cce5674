"""What changes in an engine's tables, handed out as deltas: which rows, since when, how they are read.

Deltas observe the engine's core: before a change, and which rows it touched. Rows are read from the devices when their
batch is asked for; where something else is about to change tables before that, what is left of the delta is read
first. So a delta is always of one moment, and takes memory only where others push too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core import EngineCore, StepObserver, Stepped
from penstock.errors import UsageError
from penstock.io.storage.delta_format import Block, DeltaForm, Piece, Shape, checksum_begin, checksum_with
from penstock.touched_rows import TouchedRows
from penstock.validation import whole

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.config.specs import TableSpec

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DeltaOptions:
    """What deltas contain, and how often one is made.

    slots : names of slots to include next to the weights; True: all of them
    op : add a column ``op``, "upsert" in every row
    numbered : add ``parent``, ``checksum`` and ``rows_left``, which reveal a missing, repeated, truncated or damaged
        delta
    per_steps, per_rows, per_seconds : one delta per so many steps, rows touched or seconds, whichever comes first, with
        the last value of every row that changed; none of them: one per step
    """

    slots: bool | Sequence[str] = ()
    op: bool = False
    numbered: bool = False
    per_steps: int | None = None
    per_rows: int | None = None
    per_seconds: float | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> DeltaOptions:
        """The options among the arguments of a call."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def check_unused(self, default: DeltaOptions) -> None:
        """Raise UsageError for the first option that is not the default: there are no deltas."""
        for name, value in vars(self).items():
            if value != getattr(default, name):
                raise UsageError(f"{name}: says what deltas hold; give deltas= too")


def form_of(
    specs: Iterable[TableSpec], slots: bool | Sequence[str] = (), *, op: bool = False, numbered: bool = False
) -> DeltaForm:
    """How the deltas of some tables look. Raises UsageError."""
    shapes = {spec.name: Shape(spec.dim, [slot for slot, _ in spec.slots]) for spec in specs}
    return DeltaForm(shapes, slots, op=op, numbered=numbered)


class Deltas(StepObserver):
    """What changes in the tables of an engine from now on.

    The core holds deltas weakly: a stream without a reader costs nothing. One thread asks; any may push.
    """

    come_out_here = True  # and not with another process of a job

    def __init__(self, core: EngineCore, options: DeltaOptions, clock: Callable[[], float] = time.monotonic) -> None:
        specs = core.tables.specs
        self._core, self._clock = core, clock
        self._form = form_of(specs.values(), options.slots, op=options.op, numbered=options.numbered)
        self._rows = None if options.per_rows is None else whole("per_rows", options.per_rows, 1)
        self._seconds = None if options.per_seconds is None else _positive("per_seconds", options.per_seconds)
        self._steps = None if options.per_steps is None else whole("per_steps", options.per_steps, 1)
        if self._steps is self._rows is self._seconds is None:
            self._steps = 1
        self._touched = {name: TouchedRows(rows) for name, rows in self._sizes().items()}
        self._delta: Delta | None = None  # that is being handed out
        with core.gate.still():
            self._parent, self._cut_step, self._cut_s = core.changed_step, core.global_step, clock()
            core.observe(self, weakly=True)

    @property
    def schema(self) -> pa.Schema:
        return self._form.schema

    @property
    def is_clear(self) -> bool:
        """Everything that changed has been handed out, and more was asked for: whoever took it has it."""
        return not self.num_touched and self._delta is None

    @property
    def num_touched(self) -> int:
        """Rows that changed since the last delta began; one that two steps touched may count twice."""
        return sum(touched.num_ids for touched in self._touched.values())

    @property
    def num_times(self) -> int:
        """The same, and one that two steps touched counts twice."""
        return sum(touched.num_times for touched in self._touched.values())

    def due(self) -> Iterator[pa.RecordBatch]:
        """The batches of the next delta, where an interval is over; else none."""
        return self.take() if self._is_over() else iter(())

    def take(self) -> Iterator[pa.RecordBatch]:
        """The batches of a delta of everything that changed since the last one; none where nothing did.

        Where the last one was broken off, what is left of it.
        """
        with self._core.gate.still():
            if self._delta is None:
                self._cut()
            batch = self._next()
        while batch is not None:
            yield batch
            with self._core.gate.still():
                batch = self._next()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Everything that has not been handed out, whether or not it is due."""
        if self._delta is not None:
            yield from self.take()
        yield from self.take()

    def outlive(self, error: BaseException) -> bool:
        """Whether what is left can be handed out where a run ends with this error."""
        return self._core.failed is None

    def _next(self) -> pa.RecordBatch | None:
        """The next batch of the delta being handed out; None where it is over, or there is none.

        Under the gate's lock, like every look at the delta: a step that reads its last batches (``before_step``) has
        them neither waiting nor ready for a moment, and must find the delta that it has seen there.
        """
        if self._delta is None:
            return None
        if self._delta.is_over:
            self._delta = None
            return None
        self._core.check_whole()
        return self._delta.next()

    def _cut(self) -> None:
        """An interval is over. Under the gate's lock."""
        self._cut_step, self._cut_s = self._core.global_step, self._clock()
        if blocks := self._taken():
            parent, self._parent = self._parent, self._core.changed_step
            self._delta = Delta(self._form, blocks, self._read, self._parent, parent)

    def _taken(self) -> list[Block]:
        """What has changed; from now on nothing has."""
        return [Block(name, touched.take()) for name, touched in self._touched.items() if touched.num_ids]

    def _sizes(self) -> dict[str, int]:
        """Table → how many rows may change."""
        return {name: spec.vocabulary_size for name, spec in self._core.tables.specs.items()}

    # ---- StepObserver

    def before_step(self, coalesced: Stepped) -> None:
        self.before_load()

    def before_load(self) -> None:
        """Rows are about to change: read the rest of the delta that is being handed out."""
        if self._delta is not None:
            self._delta.settle()

    def after_step(self, coalesced: Stepped) -> None:
        for name, several in coalesced.items():
            if self._core.tables.specs[name].rule.non_lazy:
                self._touched[name].add_all()
            for ids in (ids for rows in several for ids, _ in rows.parts):
                self._touched[name].add(ids)

    def loaded(self, name: str, ids: Int64 | None) -> None:
        if ids is None:
            self._touched[name].add_all()
        else:
            self._touched[name].add(ids)

    def _is_over(self) -> bool:
        """Whether it is time for a delta. Steps count from 0, not from where this began: a restart cuts alike."""
        step = self._core.global_step
        return (
            (self._steps is not None and step // self._steps > self._cut_step // self._steps)
            or (self._rows is not None and self.num_times >= self._rows)
            or (self._seconds is not None and self._clock() - self._cut_s >= self._seconds)
        )

    def _read(self, block: Block) -> Piece:
        table, ids = self._core.tables.table(block.table), ids_of(block)
        return Piece(block.table, ids, {c: table.read(ids, part) for c, part in self._columns(block.table).items()})

    def _columns(self, table: str) -> dict[str, int]:
        """What goes out of a table: column → part."""
        parts = self._core.tables.parts(table)
        return {"row": 0, **{slot: parts[slot] for slot in self._form.slots_of(table)}}


def ids_of(block: Block) -> Int64:
    return np.arange(block.ids.start, block.ids.stop) if isinstance(block.ids, range) else block.ids


class Delta:
    """One delta on its way out, batch by batch.

    read : the rows of a block as they are now
    """

    def __init__(
        self, form: DeltaForm, blocks: Sequence[Block], read: Callable[[Block], Piece], step: int, parent: int
    ) -> None:
        self._form, self._read, self._step, self._parent = form, read, step, parent
        self._waiting = deque(form.cut(blocks))
        self._ready: deque[pa.RecordBatch] = deque()
        self._rows_left = sum(len(block.ids) for block in blocks)
        self._checksum = checksum_begin(step, parent)

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._ready

    def next(self) -> pa.RecordBatch:
        """The next batch; there is one while the delta is not over."""
        return self._ready.popleft() if self._ready else self._make()

    def settle(self) -> None:
        """Read what has not been handed out."""
        while self._waiting:
            self._ready.append(self._make())

    def _make(self) -> pa.RecordBatch:
        pieces = [self._read(block) for block in self._waiting[0]]
        self._waiting.popleft()  # what cannot be read now still is to be
        self._rows_left -= sum(len(piece.ids) for piece in pieces)
        self._checksum = checksum_with(self._checksum, pieces)
        return self._form.batch(pieces, self._step, self._parent, self._checksum, self._rows_left)


def _positive(name: str, seconds: Any) -> float:
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: expected a number of seconds, got {seconds!r}") from None
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}: expected a number of seconds that is not negative, got {seconds}")
    return value
