"""The pipeline: frames in, and at an opening of the gate the coalesced gradients of every table out.

No I/O, no clock, no jax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base.errors import StateError
from penstock.base.threads import ThreadTeam
from penstock.core.freshness import FrameTimes
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Coalesced, Contributor, Frame, Int64, Overflows, Rows, Summed, SummedArrays
from penstock.model.overflows import overflows_of
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.buffer_pool import Sums
from penstock.pyx.frame_accumulate import Intake, bytes_held

# Below this many rows a second thread costs more than it saves.
ROWS_WORTH_SPLITTING = 1 << 14
# With fewer threads a table has one part, whose rows they share.
FEWEST_SPLITTING = 4


class TableStore:
    """The accumulated gradients of one table.

    The table's gradient_accumulation_status selects one of two ways. On: all frames are summed in one accumulator. Off:
    every frame is coalesced and applied separately, in arrival order.

    vocabulary_size : None: any int64 is an id
    dim : floats per row; mean : divide sums by the number of frames at the opening
    accumulate : sum all frames; False: keep them separate
    is_share : other shares have other rows of the table; separate frames are then kept even without a row here, so
        that the buffered frames have the same numbers in every share
    count_frames, count_rows : whether ``look`` says in how many frames every id occurred, and how many rows it has

    accumulator : sums a frame's rows (``pyx.frame_accumulate``), after which ``end`` must follow. It counts the rows
        and distinct ids, buffered ones included, that have entered since its ``start_counting``
    """

    def __init__(
        self,
        vocabulary_size: int | None,
        dim: int,
        *,
        accumulate: bool,
        mean: bool,
        is_share: bool = False,
        count_frames: bool = False,
        count_rows: bool = False,
    ) -> None:
        self.accumulates = accumulate
        self._mean = mean and accumulate
        self._counts_frames = count_frames and accumulate
        self.accumulator = Accumulator(
            dim, vocabulary_size=vocabulary_size, count=self._mean or self._counts_frames, count_rows=count_rows
        )
        self._whole: list[Coalesced] = []  # complete frames, if they are kept separate
        self._of_no_rows = [Coalesced.of_no_rows(dim)] if is_share else []
        self._counts_rows, self._more_rows = count_rows, 0
        self._raw: list[tuple[Int64, Int64]] = []  # ids and the raw rows of each, of a frame that was summed

    @property
    def num_rows(self) -> int:
        """Rows of whole frames since ``start_counting``; of a summed frame the raw rows."""
        return self.accumulator.num_rows + self._more_rows

    def start_counting(self) -> None:
        """Reset the counts of rows and distinct ids."""
        self._more_rows = 0
        self.accumulator.start_counting()

    def count_raw(self, blocks: Sequence[Rows]) -> None:
        """Count the raw rows of a frame that was summed before it was sent, and that has just been added."""
        for block in blocks:
            if block.counts is not None:
                self._more_rows += int(block.counts.sum()) - len(block.ids)
                if self._counts_rows:
                    self._raw.append((block.ids, block.counts))

    def end(self) -> None:
        """End a frame: if frames are kept separate, drain it into the list of complete frames."""
        if not self.accumulates:
            last = [Coalesced(self._with_raw(self.accumulator.drain()))] if len(self.accumulator) else self._of_no_rows
            self._whole += last
            self._raw = []

    def look(self) -> tuple[list[Coalesced], Int64 | None]:
        """Return what ``drain`` will return, not divided, and the frames of every id in it, if they are counted."""
        if not self.accumulates:
            return self._whole, None
        frames = [Coalesced(self._with_raw(self.accumulator.sums()))] if len(self.accumulator) else []
        return frames, self.accumulator.counts() if self._counts_frames else None

    def drain(self) -> list[Coalesced]:
        """Return and reset the sums: one Coalesced, or one per frame if accumulation is off; none if empty."""
        if self.accumulates:
            self._raw = []
            return [Coalesced(self.accumulator.drain(self._mean))] if len(self.accumulator) else []
        whole, self._whole = self._whole, []
        return whole

    @property
    def nbytes_apart(self) -> int:
        """Bytes of complete frames that are kept separate."""
        return sum([summed.nbytes for frame in self._whole for summed in frame.summed])

    def get_state(self) -> dict[str, Array]:
        """Return copies of the buffered sums as arrays: ``0.ids``, ``0.sums``, … and for several frames ``1.ids``, …"""
        if self.accumulates:
            states = [self.accumulator.get_state()] if len(self.accumulator) else []
        else:
            states = [_joined(frame) for frame in self._whole]
        return {f"{number}.{key}": array for number, arrays in enumerate(states) for key, array in arrays.items()}

    def takes(self, state: Mapping[str, Array]) -> bool:
        """Return whether sums that ``get_state`` returned are of this kind: of all frames, or of each one."""
        return not state or self.accumulates == any(key.endswith(".frames") for key in state)

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Replace the buffered sums by those that ``get_state`` returned, and reset the counts of the run."""
        num_frames = 1 + max((int(key.partition(".")[0]) for key in state), default=-1)
        self.drain()
        for number in range(num_frames):
            arrays = {key.partition(".")[2]: array for key, array in state.items() if key.startswith(f"{number}.")}
            if self.accumulates:
                self.accumulator.set_state(arrays)
            else:
                self._whole.append(Coalesced((SummedArrays(arrays["ids"], arrays["sums"], arrays.get("rows")),)))
        self.start_counting()

    def _with_raw(self, parts: tuple[Sums, ...]) -> tuple[Summed, ...]:
        """Return sums with the number of raw rows of each id, in place of that of the rows that were added."""
        if not self._raw:
            return parts
        ids, counts = (np.concatenate(arrays) for arrays in zip(*self._raw, strict=True))
        order = np.argsort(ids)
        indices = [order[np.searchsorted(ids, part.ids, sorter=order)] for part in parts]
        return tuple([SummedArrays(part.ids, part.sums, counts[i]) for part, i in zip(parts, indices, strict=True)])


def store_of(
    spec: TableSpec, mean: bool = False, *, is_share: bool = False, sums: bool = True, count_rows: bool | None = None
) -> TableStore:
    """Return the store of a table's rows. sums : False: rows have no floats; count_rows : None: as its keys need it"""
    dynamic = spec.dynamic
    return TableStore(
        spec.vocabulary_size if dynamic is None else None,
        spec.dim if sums else 0,
        accumulate=spec.accumulate,
        mean=mean,
        is_share=is_share,
        count_frames=dynamic is not None and dynamic.count == "frames",
        count_rows=dynamic is not None and dynamic.counts_rows if count_rows is None else count_rows,
    )


def _joined(frame: Coalesced) -> dict[str, Array]:
    ids, sums = (np.concatenate([part[column] for part in frame.parts]) for column in range(2))
    rows = [part.rows for part in frame.summed if part.rows is not None]
    return {"ids": ids, "sums": sums, **({"rows": np.concatenate(rows)} if rows else {})}


class BadRowsError(Exception):
    """A frame contains a bad row. Nothing of it was added: push the repaired frame.

    overflows : of a frame without an audit, the rows at which a sum leaves the finite range; None: it was not audited
    """

    def __init__(self, overflows: Overflows | None) -> None:
        super().__init__()
        self.overflows = overflows

    def repaired(self, frame: Frame) -> Frame:
        """Return the frame without its bad rows. Raises InputError where those are errors."""
        return frame.audited() if self.overflows is None else frame.without(self.overflows)


class Pipeline:
    """The sums of all tables between two openings of the gate.

    stores : by table
    team : coalesces tables in parallel, and large blocks in parts; results do not depend on its threads

    num_added : frames added; is_whole : False while a frame is added: an error has left a part of it in the sums
    last_rates : learning rates of the last frame added, if it had any
    time : the largest time of any frame added; None: no frame had one
    frame_times : of the frames in the sums, if one has a time, but not of those before a restart

    Call every method under the gate's lock.
    """

    def __init__(self, stores: Mapping[str, TableStore], team: ThreadTeam) -> None:
        self.stores, self.team = stores, team
        self._intake = Intake()
        self._accumulators = [store.accumulator for store in stores.values()]
        self._apart = [table for table, store in stores.items() if not store.accumulates]
        # Step and contributor of the last frame. Not the frame: its rows may keep a whole batch in memory.
        self._last: tuple[int | None, Contributor] | None = None
        self.last_rates: tuple[float, ...] | None = None
        self.num_added, self.is_whole = 0, True
        self.time: int | None = None
        self.frame_times: FrameTimes | None = None

    def add(self, frame: Frame) -> None:
        """Add a frame to the sums, or nothing of it.

        Raises BadRowsError for a frame that was not audited and contains a bad row, and for rows at which a sum leaves
        the finite range.
        """
        intake, rows = self._intake, frame.rows
        tables, parts, total, summed = list(rows), None, 0, False
        for blocks in rows.values():
            for block in blocks:
                total += len(block.ids)
                summed = summed or block.counts is not None
        alone = total < ROWS_WORTH_SPLITTING
        if not alone:
            tables, parts = self._split(rows, total)
        stores = [self.stores[table] for table in tables]
        vacant = intake.begin(
            [store.accumulator for store in stores], [rows[table] for table in tables], self.num_added + 1, parts
        )
        try:
            if not vacant:
                self._check(frame, alone)
            if summed and not vacant:
                raise StateError("a frame that was summed before it was sent needs a gate that every frame opens")
            self.is_whole = False
            num_tasks = intake.add()
        except BaseException:
            intake.cancel()
            raise
        if not self._work(num_tasks, alone):
            assert vacant  # else the rows were validated above
            intake.undo()
            self.is_whole = True
            raise BadRowsError(self._overflows(rows) if frame.audit is None else None)
        intake.end()
        if summed:
            for table in tables:
                self.stores[table].count_raw(rows[table])
        for table in self._apart:
            if table in rows:
                self.stores[table].end()
        if frame.time is not None:
            self.time = max(frame.time, self.time or 0)
            self.frame_times = self.frame_times or FrameTimes()
            self.frame_times.add(frame.time)
        self.added(1, frame.local_step, frame.contributor, frame.learning_rates)

    def added(
        self, num: int, local_step: int | None, contributor: Contributor = None, rates: tuple[float, ...] | None = None
    ) -> None:
        """Count frames that were added, all of them whole. The others are those of the last one."""
        self.num_added += num
        self._last, self.last_rates, self.is_whole = (local_step, contributor), rates, True

    def check(self, frame: Frame) -> None:
        """Raise BadRowsError as ``add`` would. Nothing changes."""
        rows, total = frame.rows, 0
        for blocks in rows.values():
            for block in blocks:
                total += len(block.ids)
        accumulators = [self.stores[table].accumulator for table in rows]
        self._intake.begin(accumulators, list(rows.values()), self.num_added + 1)
        try:
            self._check(frame, total < ROWS_WORTH_SPLITTING)
        finally:
            self._intake.cancel()

    def has_only(self, table: str) -> bool:
        """Return whether no other table has sums."""
        others = [store for name, store in self.stores.items() if name != table]
        return not any(len(store.accumulator) or store.nbytes_apart for store in others)

    @property
    def is_empty(self) -> bool:
        """Return whether no table has sums."""
        return not any(len(store.accumulator) or store.nbytes_apart for store in self.stores.values())

    def drain(self) -> dict[str, list[Coalesced]]:
        """Return and reset the sums of every table."""
        drained = {}
        for name, store in self.stores.items():
            drained[name] = store.drain()
        return drained

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return bytes_held(self._accumulators) + sum([self.stores[table].nbytes_apart for table in self._apart])

    def get_state(self) -> dict[str, Any]:
        """Return the state next to the stores, as plain data: frames added, and the fields of the last one."""
        state = {"num_admitted": self.num_added, "last": self._last and [*self._last, self.last_rates]}
        return state if self.time is None else {**state, "time": self.time}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``get_state`` returned, or its copy through JSON."""
        self.num_added, self.time = int(state["num_admitted"]), state.get("time")
        self._last = self.last_rates = None
        if state["last"] is not None:
            step, contributor, rates = state["last"]
            self._last, self.last_rates = (step, contributor), None if rates is None else tuple(rates)

    def _check(self, frame: Frame, alone: bool) -> None:
        """Validate every row of the frame that was begun, before it is added to sums, where it could not be undone."""
        if not self._work(self._intake.check(1 if alone else self.team.threads), alone):
            raise BadRowsError(self._overflows(frame.rows) if frame.audit is None else None)
        if self._intake.may_overflow:
            overflows = self._overflows(frame.rows)
            if any(mask.any() for masks in overflows.values() for mask in masks):
                raise BadRowsError(overflows if frame.audit is None else None)

    def _overflows(self, rows: Mapping[str, Sequence[Rows]]) -> Overflows:
        """Return the rows at which a sum leaves the finite range."""
        return {table: overflows_of(blocks, self.stores[table].accumulator.sums()) for table, blocks in rows.items()}

    def _split(self, rows: Mapping[str, Sequence[Rows]], total: int) -> tuple[list[str], list[int]]:
        """Return the tables of a frame, and the number of parts of each: more than one for a table that dominates.

        The largest is first, so that no thread begins a large table when the others are done. There are four parts for
        each thread, since hot ids are often neighbours, of an eighth of the rows worth splitting at least.
        """
        num_rows = {table: sum([len(block.ids) for block in blocks]) for table, blocks in rows.items()}
        tables, threads = sorted(num_rows, key=num_rows.__getitem__, reverse=True), self.team.threads
        if threads < FEWEST_SPLITTING:
            return tables, [1] * len(tables)
        most = [num_rows[table] * min(4 * threads / total, 8 / ROWS_WORTH_SPLITTING) for table in tables]
        return tables, [1 << (int(num) - 1).bit_length() if num > 2 else 1 for num in most]

    def _work(self, num_tasks: int, alone: bool) -> bool:
        """Run the tasks of the intake, and return False if a row is bad. alone : on the calling thread only"""
        if alone:
            return self._intake.work(alone)
        try:
            return self.team.run([self._intake.work] * min(num_tasks, self.team.threads))
        except MemoryError:
            # A thread found no memory for its own call, before it took a task of the intake: this one does the rest.
            return self._intake.work()
