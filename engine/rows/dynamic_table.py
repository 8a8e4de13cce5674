"""A dynamic table: any 64-bit key is an id, and a directory says which keys have a row of the table on the devices.

Everything else of an engine sees an ordinary table of ``vocabulary_size`` rows. What an opening does to the directory
is planned before any table changes, and committed with the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import CapacityError, StateError
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64, valid_ids
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Coalesced, Float32, Int64, SummedArrays
from penstock.model.row_encodings import nearest
from penstock.model.stats import KeyReport
from penstock.pyx.keys.directory_plan import Plan
from penstock.pyx.row_keys import RowKeys
from penstock.rows.initializers import InitialRows, initial_rows
from penstock.rows.key_directory import clock_at, key_report, keys_of_opening, make_directory, no_room, no_room_for_load

if TYPE_CHECKING:
    from penstock.rows.bridge.device_tables import DeviceTable

_ROWS_AT_ONCE = 1 << 16
_FLOATS_AT_ONCE, _FLOATS_PER_TASK = 1 << 20, 1 << 14  # of new rows
_NO_KEYS = np.zeros(0, np.int64)

Run = Callable[[list[Callable[[], bool]]], Any]


class DynamicTable:
    """The keys of one table, and its rows.

    table : on the devices; seed : of the initial rows, the hash and admission by chance
    run : runs tasks on the engine's threads; share : (rank, count): only the keys of one of ``count`` shares

    row_keys : the keys with their rows for readers without a lock, once there are any
    id_range : ANY_INT64 or ANY_UINT64
    absent : what a key without a row reads
    carried_out : the plans of the step or load
    """

    def __init__(self, spec: TableSpec, table: DeviceTable, seed: int, run: Run, share: tuple[int, int]) -> None:
        settings = spec.dynamic
        assert settings is not None
        self.spec, self.settings, self._table, self.run = spec, settings, table, run
        self._initial = initial_rows(spec, seed)
        self.absent = self._initial if settings.missing == "initial" else InitialRows()
        # Kept open; vectors that do not fit are found now.
        self._vectors = self._initial.vectors(spec.id_type, spec.dim) if self._initial.kind == "vectors" else None
        self.row_keys: RowKeys | None = None
        self.directory = make_directory(spec, seed, share=share)
        self._has_opened = False
        if table.layout.bfloat16:
            table.key_by(self.directory.keys)
        self.id_range = ANY_UINT64 if spec.id_type == "uint64" else ANY_INT64
        self._plan: Plan | None = None
        self.forget_changes()
        self.start_counting()

    # ---- counts

    def start_counting(self) -> None:
        """Reset the counts of the previous run."""
        self._counted_before, self._rolled_back = self.directory.counts, 0

    def report(self, expired_waiting: int) -> KeyReport:
        """Return the keys now, and what became of keys since ``start_counting``. expired_waiting : as counted"""
        report = key_report(self.directory, self._counted_before, expired_waiting)
        return replace(report, rolled_back=self._rolled_back)

    def has_slots(self, spec: TableSpec) -> None:
        """Note that rows have slots from now on. spec : of the table since then"""
        self.spec = spec
        if self._table.layout.bfloat16:
            self._table.key_by(self.directory.keys)

    # ---- a step

    def plan(self, frames: Sequence[Coalesced], num_frames: Int64 | None, clock: int, step: int) -> None:
        """Decide what an opening does; nothing changes yet.

        frames : the sums of the opening, by key; num_frames : of every key of the one Coalesced, in order, if counted
        Raises CapacityError if a new key finds no room and the settings say so.
        """
        keys, rows, num_frames = keys_of_opening(frames, num_frames, self.directory.array)
        if not self._has_opened:
            self._stamp(self.directory.clock, clock)
        self._plan = Plan(self.directory, keys, rows, num_frames, clock=clock, step=step, run=self.run)
        if self._plan.num_rejected and self.settings.on_full == "error":
            raise self._no_room()

    def with_rows(self, frames: Sequence[Coalesced]) -> list[Coalesced]:
        """Return the sums of the planned opening by row, without those of keys that were not admitted."""
        plan, located = self._plan, []
        assert plan is not None
        first = 0
        for frame in frames:
            summed = []
            for part in frame.summed:
                if len(frames) > 1:
                    rows = plan.key_rows[np.searchsorted(plan.keys, part.ids)]
                else:
                    rows, first = plan.key_rows[first : first + part.num_ids], first + part.num_ids
                sums = part.sums
                if not plan.all_have_rows:
                    admitted = rows >= 0
                    rows, sums = rows[admitted], sums[admitted]
                summed.append(SummedArrays(rows, sums))
            located.append(Coalesced(tuple(summed)))
        return located

    def forget_changes(self) -> None:
        """End a step or a load: drop its plans, which hold about 33 bytes per key of it."""
        self.carried_out: list[Plan] = []
        self._stamped = self._replaced = self._fresh = _NO_KEYS

    def changes(self, last: bool) -> Int64:
        """Return the keys that the step or load removed or changed, int64 (n,); a key may occur several times.

        last : also the keys of which only the stamps changed
        """
        keys = [(plan.removed()[0], plan.keys[plan.key_rows >= 0]) for plan in self.carried_out]
        return np.concatenate([self._replaced, self._stamped if last else _NO_KEYS, *itertools.chain(*keys)])

    def carry_out(self, opens: bool = True) -> None:
        """Carry the plan out: new keys get their initial rows. The updates of the step follow.

        opens : the plan is of an opening, not of a load
        """
        plan, before = self._plan, self.directory.clock
        assert plan is not None
        fresh = plan.fresh
        if self.row_keys is not None:
            self.row_keys.remove(plan.removed()[0])
        self._table.create_rows(plan.key_rows[fresh], self._starts(plan.keys[fresh]))
        plan.commit()
        self._publish(plan.key_rows, self.directory.clock, plan.keys[fresh], plan.key_rows[fresh])
        self.carried_out.append(plan)
        self._plan = None
        if opens and not self._has_opened:
            self._has_opened = True
            if self.directory.clock != before:
                self._stamped = self.directory.state()["key"]

    def drop_plan(self) -> None:
        """Drop the plan of a step that is not taken."""
        if self._plan is not None:
            self._plan.cancel()
            self._plan = None
            if not self._has_opened:
                self._stamp(-1, self.directory.clock)

    # ---- a rollback

    def replace_keys(self, state: Mapping[str, Array]) -> Int64:
        """Replace the keys by saved ones, before their rows are written. Returns rows as ``set_state`` does."""
        before, counts = self.directory.state(), self.directory.counts
        rows_now = self.set_state(state)
        after = self.directory.state()
        keys, i, j = np.intersect1d(before["key"], after["key"], assume_unique=True, return_indices=True)
        stays = before["row"][i] == after["row"][j]
        same = keys[stays]
        lost = np.setdiff1d(before["key"], same, assume_unique=True)
        self._fresh = np.setdiff1d(after["key"], same, assume_unique=True)
        self._replaced = np.concatenate([lost, self._fresh])
        self._stamped = keys[stays & (before["last"][i] != after["last"][j])]
        if self.row_keys is not None:
            self.row_keys.remove(lost)
        # The counts of the run in progress continue.
        now = self.directory.counts
        self._counted_before = {name: n + now[name] - counts[name] for name, n in self._counted_before.items()}
        self._rolled_back += len(after["key"]) - len(before["key"])
        return rows_now

    def rows_replaced(self, rows: Int64) -> Int64:
        """Return the keys that a rollback changed, after it has written their rows, distinct. rows : those written"""
        self._replaced = np.union1d(self._replaced, self.directory.keys(rows))
        state, fresh_rows = self.directory.state(), self.directory.rows(self._fresh, expired=True).astype(np.int64)
        self._publish(state["row"].astype(np.int64), state["last"].astype(np.int64), self._fresh, fresh_rows)
        return self._replaced

    def _no_room(self, of_load: bool = False) -> CapacityError:
        """Drop the plan, and return the error of the new keys that it rejects."""
        assert self._plan is not None
        error = no_room(self.spec, self.directory, self._plan, of_load)
        self.drop_plan()
        return error

    def _stamp(self, before: int, clock: int) -> None:
        """Change the stamps of all keys. Those that were loaded before the first opening count as if they occurred at
        it: a clock that is a time would find them expired."""
        if len(self.directory) and clock != before:
            state = self.directory.get_state()
            self.directory.set_state({**state, "last": np.full_like(state["last"], clock)})
            if self.row_keys is not None:
                self.row_keys.stamp(self.directory.state()["row"].astype(np.int64), clock)

    def publish_keys(self, row_keys: RowKeys) -> None:
        """Keep the keys with their rows in ``row_keys``, which has none, from now on."""
        self.row_keys, state = row_keys, self.directory.state()
        rows = state["row"].astype(np.int64)
        self._publish(rows, state["last"].astype(np.int64), state["key"], rows)

    def _publish(self, rows: Int64, last: Int64 | int, keys: Int64, key_rows: Int64) -> None:
        """Set when the keys of rows occurred last, and give rows to keys without one, for readers without a lock."""
        if self.row_keys is not None:
            self.row_keys.stamp(rows, last)
            self.row_keys.set_clock(self.directory.clock)
            self.row_keys.insert(keys, key_rows)

    def _starts(self, keys: Int64) -> Iterator[Float32]:
        """Yield the initial weights of keys in blocks that fit in a cache."""
        dim = self.spec.dim
        size, at_once = max(1, _FLOATS_AT_ONCE // dim), max(1, _FLOATS_PER_TASK // dim)
        for first in range(0, len(keys), size):
            block = self.as_given(keys[first : first + size])
            weights = self.directory.array(np.float32, len(block) * dim).reshape(-1, dim)
            spans = [slice(n, n + at_once) for n in range(0, len(block), at_once)]
            self.run([partial(self._fill, block, weights, span) for span in spans])
            yield weights

    def _fill(self, keys: npt.NDArray[Any], weights: Float32, span: slice) -> bool:
        self._initial.fill(keys[span], weights[span])
        return True

    # ---- reading and writing by key

    def initial(self, keys: Int64, part: int = 0) -> Float32:
        """Return one part of the initial rows of keys, as it is stored: float32 (n, floats of the part)."""
        spec = self.spec
        if part:
            return np.full((len(keys), spec.part_dims[part]), spec.slots[part - 1][1], np.float32)
        weights = np.empty((len(keys), spec.dim), np.float32)
        self._initial.fill(self.as_given(keys), weights)
        return nearest(weights) if self._table.layout.bfloat16 else weights

    def differing(self, keys: Int64, values: Sequence[Float32]) -> npt.NDArray[np.bool_]:
        """Return which keys have other rows than their initial ones, bit by bit. values : of every part"""
        mask = np.zeros(len(keys), bool)
        for part, rows in enumerate(values):
            mask |= (self.initial(keys, part).view(np.int32) != rows.view(np.int32)).any(axis=1)
        return mask

    def read(self, keys: Int64, part: int = 0) -> Float32:
        """Return one part of the rows of keys, which may repeat, float32 (n, ·); absent keys as the settings say."""
        rows = self.directory.rows(keys).astype(np.int64)
        absent = rows < 0
        if not absent.any():
            return self._table.read(rows, part)
        values = np.zeros((len(keys), self._table.part_dims[part]), np.float32)
        values[~absent] = self._table.read(rows[~absent], part)
        if self.settings.missing == "initial" or part:
            values[absent] = self.initial(keys[absent], part)
        return values

    def admit(self, keys: Int64) -> Int64:
        """Return the rows of distinct keys, which are admitted without a filter, at the clock of the last step.

        Raises CapacityError, also if keys of this load would have to be evicted; nothing has changed then.
        """
        plan = Plan(self.directory, keys, clock=self.directory.clock, step=0, admit_all=True, run=self.run)
        self._plan = plan
        if plan.num_rejected:
            raise self._no_room(of_load=True)
        if plan.num_evicted and self.carried_out:
            loaded = np.concatenate([opening.keys for opening in self.carried_out])
            if num_lost := int(np.isin(plan.removed()[0], loaded).sum()):
                self.drop_plan()
                raise no_room_for_load(self.spec.name, self.directory, num_lost)
        self.carry_out(opens=False)
        rows: Int64 = plan.key_rows
        return rows

    def valid_keys(self, keys: Any) -> Int64:
        """Return keys as int64, those of uint64 keys by their bits. Raises UsageError."""
        return valid_ids(self.spec.name, keys, self.id_range)

    def as_given(self, keys: Int64) -> npt.NDArray[Any]:
        """Return keys in their type."""
        return keys.view(self.spec.id_type)

    def sorted(self) -> tuple[npt.NDArray[Any], Callable[[int], Iterator[Float32]]]:
        """Return the keys, ascending, without expired ones, and a function that yields one part of their rows."""
        state = self.directory.state(expired=False)
        keys = self.as_given(state["key"])
        order = np.argsort(keys)
        return keys[order], partial(self._blocks, state["row"][order].astype(np.int64))

    def stream(self, part: int) -> Iterator[Float32]:
        """Yield one part of the rows in order of the mixed key, in blocks, without those of expired keys."""
        return self._blocks(self.directory.state(expired=False)["row"].astype(np.int64), part)

    def _blocks(self, rows: Int64, part: int) -> Iterator[Float32]:
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            yield self._table.read(rows[first : first + _ROWS_AT_ONCE], part)

    # ---- state

    def key_arrays(self) -> tuple[list[Array], int]:
        """Return the keys and all that decides their future, as arrays: last and count of each, the candidates; and the
        clock."""
        state, waiting = self.directory.state(expired=False), self.directory.candidates()
        arrays = (state["key"], state["last"], state.get("count"), *waiting.values())
        return [array for array in arrays if array is not None], self.directory.clock

    def get_state(self) -> dict[str, Array]:
        return {**self.directory.get_state(), "has_opened": np.array([self._has_opened])}

    def set_state(self, state: Mapping[str, Array]) -> Int64:
        """Restore the keys; return for every row of the saved table, of all shares, the row here, -1: none."""
        try:
            rows = self.directory.set_state(state)
        except ValueError as error:
            raise StateError(f"table '{self.spec.name}': {error}") from None
        self._has_opened = bool(state["has_opened"][0])
        rows_now = np.full(int(state["numbers"][0]), -1, np.int64)
        rows_now[state["row"]] = rows
        return rows_now


Look = Callable[[str], tuple[list[Coalesced], Int64 | None]]


class TableKeys(dict[str, DynamicTable]):
    """The dynamic tables of one engine by name; it may have none."""

    # ---- a step or a load

    def plan(self, look: Look, step: int, time: int | None) -> None:
        """Decide which keys get and lose rows in a step. look : ``TableStore.look`` of a table

        time : the largest of any frame so far, if frames have times. Raises CapacityError; nothing has changed then.
        """
        try:
            for name, table in self.items():
                table.plan(*look(name), clock_at(table.spec, table.directory, step, time), step)
        except BaseException:
            for table in self.values():
                table.drop_plan()
            raise

    def with_rows(self, coalesced: dict[str, list[Coalesced]]) -> dict[str, list[Coalesced]]:
        """Return the sums of the planned step by row, where they were by key."""
        for name, table in self.items():
            coalesced[name] = table.with_rows(coalesced[name])
        return coalesced

    def carry_out(self) -> None:
        """Carry the plans out: new keys get their initial rows. The updates of the step follow."""
        for table in self.values():
            table.carry_out()

    def have_lost(self) -> bool:
        """Return whether the step or load has removed a key."""
        return any(plan.num_expired or plan.num_evicted for table in self.values() for plan in table.carried_out)

    def forget_changes(self) -> None:
        """End a step or a load."""
        for table in self.values():
            table.forget_changes()

    # ---- counts

    def start_counting(self) -> None:
        """Reset the counts of the previous run."""
        for table in self.values():
            table.start_counting()

    def expired_waiting(self, still: Callable[[], AbstractContextManager[object]]) -> dict[str, int]:
        """Return how many expired keys of every table still have a row, for which all entries are read.

        still : keeps frames out while some shards are read
        """
        counts = dict.fromkeys(self, 0)
        for name, table in self.items():
            directory = table.directory
            at_once = max(1, _ROWS_AT_ONCE * directory.num_shards // directory.capacity)
            for first in range(0, directory.num_shards, at_once):
                with still():
                    counts[name] += directory.num_expired_waiting(first, at_once)
        return counts

    def reports(self, expired_waiting: Mapping[str, int]) -> dict[str, KeyReport]:
        """Return the keys of every table now, and what became of keys since ``start_counting``."""
        return {name: table.report(expired_waiting[name]) for name, table in self.items()}
