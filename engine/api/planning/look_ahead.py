"""Reads the frames of a run ahead of the step that they are applied in, for the cached tables of its engine.

The frames enter a second gate as they are read, without their gradients, and so foretell which rows the next openings
of the engine's gate will use. Nothing else of a run sees a frame before its turn: what the reader learned from a frame
is handed on with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.base.errors import InputError
from penstock.base.threads import ThreadTeam
from penstock.core.engine_core import EngineCore
from penstock.core.pipeline import Pipeline, TableStore, store_of
from penstock.core.rounds import EarlyRecord
from penstock.core.trial_gate import TrialGate
from penstock.io.decoding.reader import FrameReader
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame, FrameRun, Int64, Rows

Opening = Mapping[str, list[Int64]]  # table → the ids of each of its uses


@dataclass(eq=False)
class _Read:
    """A frame that was read ahead.

    number : of its source; frame : None: reading ended, with ``error`` if it raised one
    fraction, first_bad : what the reader reported then: the share read so far, and the first bad rows that are new
    num_opened : foretold openings up to this frame
    moment : the global step and the number of frames in the gate after it; None: it cannot be foretold
    """

    number: int = 0
    frame: Frame | None = None
    error: Exception | None = None
    fraction: float | None = None
    first_bad: Mapping[str, str] = field(default_factory=dict)
    num_opened: int = 0
    moment: tuple[int, int] | None = None


class LookAhead:
    """The frames of one run in their order, each read as many openings early as a cached table looks ahead.

    reader : its options decide about bad rows
    flush : whether the run opens the gate early at its end

    fraction, first_bad : of the reader, as they were when the frame that was yielded last was read
    """

    def __init__(self, core: EngineCore, reader: FrameReader, flush: bool) -> None:
        self._core, self._reader, self._flush = core, reader, flush
        self._tables = looked_ahead(core.tables.specs)
        self._waiting: deque[_Read] = deque()
        self._pauses = self._has_ended = False  # the source
        self._openings: deque[Opening] = deque()  # foretold and to come
        self._num_opened = 0  # openings foretold, of which those to come are the last
        self._published = dict.fromkeys(self._tables, 0)  # table → openings that it knows of
        self._gate: TrialGate | None = None
        self.fraction: float | None = None
        self.first_bad: dict[str, str] = {}

    def runs(self, runs: Iterator[tuple[int, FrameRun]]) -> Generator[tuple[int, FrameRun], None, None]:
        """Yield the frames one by one, the next when the one before was applied."""
        try:
            self._begin()
            while True:
                self._read(runs)
                read = self._waiting.popleft()
                self.fraction = read.fraction
                self.first_bad.update(read.first_bad)
                if read.error is not None:
                    raise read.error
                if read.frame is None:
                    return
                self._publish()
                yield read.number, FrameRun.of(read.frame)
                self._compare(read)
                self._pauses = self._pauses and not _is_pause(read.frame)
        except BaseException:  # at an end without one, all but an opening by a flush has happened
            with self._core.gate.still():
                self._core.tables.forget_foreseen()
            raise

    # ---- reading

    def _read(self, runs: Iterator[tuple[int, FrameRun]]) -> None:
        """Read until as many openings are foretold as a table looks ahead, or the source pauses, ends or is bad."""
        most = max(self._tables.values())
        while not self._pauses and not self._has_ended and len(self._openings) <= most:
            if self._gate is None and self._waiting:
                return
            read = _Read()
            try:
                if (item := next(runs, None)) is not None:
                    read.number, read.frame = item[0], item[1].frame()
            except Exception as error:  # raised when the frames before it are applied
                read.error = error
            if read.frame is None:
                self._has_ended = True
                self._flush = self._flush and read.error is None
                self._open_early()
            elif _is_pause(read.frame):
                self._pauses = True
            elif not read.frame.is_void:
                self._foretell(read)
            read.fraction = self._reader.fraction()
            read.first_bad = {n: text for n, text in self._reader.first_bad.items() if n not in self.first_bad}
            self._waiting.append(read)

    def _open_early(self) -> None:
        """Foretell the opening at the end of the run."""
        if self._flush and self._has_ended and self._gate is not None:
            self._gate.open(early=True)

    def _foretell(self, read: _Read) -> None:
        """Push the ids of a frame."""
        assert read.frame is not None
        if self._gate is not None:
            try:
                read.frame = self._core.reduced(read.frame)
                # A frame that waits for its turn is whole and valid.
                if self._reader.options.on_bad_row != "error" or self._core.turns is not None:
                    read.frame = read.frame.audited()
                self._gate.admit(self._ids(read.frame))
                self._gate.open()
            except InputError:  # raised again when the frame is applied, which ends the run
                self._gate = None
        self._note(read)

    def _ids(self, frame: Frame) -> Frame:
        """Return a frame with the rows of the tables that look ahead, without gradients."""
        rows = {
            name: tuple(Rows(block.ids, np.empty((len(block.ids), 0), np.float32)) for block in blocks)
            for name, blocks in frame.rows.items()
            if name in self._tables
        }
        return replace(frame, rows=rows)

    def _note(self, read: _Read) -> None:
        read.num_opened, read.moment = self._num_opened, None
        if self._gate is not None:
            read.moment = (self._gate.gate.global_step, self._gate.num_pending)

    # ---- openings

    def _begin(self) -> None:
        """Foretell from the state of the engine's gate on."""
        core, tables = self._core, self._core.tables
        specs = tables.held.specs
        options = {"is_share": tables.held.is_share, "sums": False, "count_rows": False}
        stores = {name: store_of(specs[name], **options) for name in self._tables}
        with core.gate.still():
            pipeline = Pipeline(stores, ThreadTeam(core.pipeline.team.threads))
            self._gate = TrialGate(core.policy, pipeline, partial(self._note_opening, stores))
            self._gate.gate.set_state(core.gate.get_state())
            if core.turns is not None and self._gate.turns is not None:
                self._gate.turns.set_state(core.turns.get_state(), map(self._ids_of, core.turns.records()))
            for name, store in stores.items():
                state: dict[str, Any] = {}
                for number, frame in enumerate(core.pipeline.stores[name].look()[0]):
                    ids = frame.ids
                    none = np.zeros(len(ids), np.int64)
                    of_frame = {"ids": ids, "sums": np.empty((len(ids), 0), np.float32), "counts": none, "frames": none}
                    state |= {f"{number}.{key}": array for key, array in of_frame.items()}
                store.set_state(state)

    def _ids_of(self, early: EarlyRecord) -> EarlyRecord:
        """Return a frame that waits for its turn as ``_ids`` would."""
        header, arrays = early
        ids = {table: arrays[f"{number}.ids"] for number, table in enumerate(header["tables"]) if table in self._tables}
        rows: dict[str, Any] = {}
        for number, array in enumerate(ids.values()):
            rows |= {f"{number}.ids": array, f"{number}.grads": np.empty((len(array), 0), np.float32)}
        return {**header, "tables": list(ids)}, rows

    def _note_opening(self, stores: Mapping[str, TableStore]) -> None:
        self._openings.append({name: [frame.ids for frame in store.look()[0]] for name, store in stores.items()})
        self._num_opened += 1

    def _publish(self) -> None:
        """Let every table know the openings that it looks ahead to, and the one that comes first."""
        tables, first = self._core.tables, self._num_opened - len(self._openings)
        with self._core.gate.still():
            for name, look_ahead in self._tables.items():
                end = min(self._num_opened, first + look_ahead + 1)
                for number in range(self._published[name], end):
                    for ids in self._openings[number - first][name]:
                        tables.foresee(name, self._rows(name, ids))
                self._published[name] = max(self._published[name], end)

    def _rows(self, name: str, ids: Int64) -> Int64:
        """Return the rows of ids; of keys those that they have now, without keys that have none."""
        dynamic = self._core.tables.dynamic.get(name)
        if dynamic is None:
            return ids
        rows = dynamic.directory.rows(ids).astype(np.int64)
        return rows[rows >= 0]

    def _compare(self, read: _Read) -> None:
        """Remove the openings that have happened. Begin anew if other producers have changed the gate."""
        gate = self._core.gate
        assert read.frame is not None
        if not read.frame.is_void:
            while self._openings and self._num_opened - len(self._openings) < read.num_opened:
                self._openings.popleft()
        if self._gate is None or read.frame.is_void or (gate.global_step, self._core.num_pending) == read.moment:
            return
        with gate.still():
            self._core.tables.forget_foreseen()
            self._openings.clear()
            self._published = dict.fromkeys(self._tables, self._num_opened)
            self._begin()
            for waiting in self._waiting:
                if waiting.frame is not None and not waiting.frame.is_void:
                    self._foretell(waiting)
            self._open_early()


def _is_pause(frame: Frame) -> bool:
    return frame.is_void and not frame.position


def looked_ahead(specs: Mapping[str, TableSpec]) -> dict[str, int]:
    """Return by how many openings each cached table looks ahead, without those that do not."""
    cached = {
        name: spec.placement for name, spec in specs.items() if spec.placement.where == "cached" and spec.trainable
    }
    return {name: placement.look_ahead for name, placement in cached.items() if placement.look_ahead}
