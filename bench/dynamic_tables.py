"""The sides of the cases of dynamic tables: updates by key, keys without gradients, and their baselines.

Like ``penstock_adapter``, it uses the Engine and its internals.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from penstock.api.engine import Engine
from penstock.base.threads import ThreadTeam
from penstock.bench import memory_bandwidth
from penstock.bench.contestants import OURS, KeyWay, Runner
from penstock.bench.distributions import Int64, hashed
from penstock.bench.penstock_adapter import Ours, Update, roomy
from penstock.bench.workloads import Float32, Step, Workload
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.frames import Coalesced, SummedArrays
from penstock.model.updates import Adagrad
from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan
from penstock.rows.dynamic_table import DynamicTable

LINES, WITHOUT = "random_lines", "penstock_without"
LINE_BYTES = 64
KEYS_AT_ONCE = 1 << 20

# keys/evict: the share of the table's keys that are new in a step, and the samples of each round.
TURNOVER, STEPS_PER_ROUND = 0.01, 8
EXPIRE_AFTER = 90  # steps; a key that no step touches is among the oldest after about as many


class ByKey(Update):
    """``Engine.run`` over batches of hashed ids; every id of the vocabulary has a row."""

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int) -> None:
        super().__init__(workload, "dynamic", [by_key(step) for step in steps], threads)
        for table in workload.tables:
            for first in range(0, table.vocabulary_size, KEYS_AT_ONCE):
                keys = hashed(np.arange(first, min(first + KEYS_AT_ONCE, table.vocabulary_size)))
                with self.engine.core.still():
                    self.engine.core.tables.dynamic[table.name].admit(keys)

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return super().read_rows(table, hashed(ids))


def by_key(step: Step) -> Step:
    """Return the step with hashed ids; it references the same gradients."""
    return Step(step.workload, hashed(step.ids), step.values)


# ---- keys without gradients


@dataclass
class Keys:
    """A directory, and the number of its openings."""

    directory: Directory
    openings: int = field(default=0)


def directory_way(threads: int) -> KeyWay:
    """Return penstock's way: a plan and its commit, as in a step."""
    run = ThreadTeam(threads).run if threads > 1 else None

    def number(state: Keys, keys: Int64) -> Int64:
        state.openings += 1
        plan = Plan(state.directory, keys, clock=state.openings, step=state.openings, run=run)
        plan.commit()
        rows: Int64 = plan.key_rows
        return rows

    return KeyWay(OURS, OURS, lambda size: Keys(Directory(roomy(size), 0, "bench", evict="lru")), number)


class Numbering:
    """A KeyWay on batches of keys of one kind.

    lookup : present keys of a table that contains the whole vocabulary
    insert : new keys of an empty table
    stream : half of the keys are new; the table contains as many keys as a batch at first
    """

    def __init__(self, way: KeyWay, workload: Workload, steps: Sequence[Step], kind: str) -> None:
        self._way, self._kind, (table,) = way, kind, workload.tables
        rows = table.rows
        old, new = {"lookup": (table.vocabulary_size, 0), "insert": (0, rows), "stream": (rows, rows // 2)}[kind]
        self._num_keys = old + new * len(steps)
        self._old = way.convert(hashed(np.arange(old)))
        ids = present(steps) if kind == "lookup" else fresh(rows, new, old, len(steps))
        keys = [hashed(batch) for batch in ids]
        self._batches = [way.convert(batch) for batch in keys]
        self._call = (way.look_up if kind == "lookup" else None) or way.number
        self._fill()
        self.num_wrong = self._num_wrong(keys[0])

    def _fill(self) -> None:
        self.state = self._way.create(self._num_keys)
        if len(self._old):
            self._way.finish(self._way.number(self.state, self._old))

    def prepare(self, steps: Sequence[int]) -> None:
        if self._kind != "lookup":
            self._fill()

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            self._way.finish(self._call(self.state, self._batches[number]))

    def _num_wrong(self, keys: Int64) -> int:
        """Return how many of the keys have the number of another key, no number, or another one the second time."""
        convert, to_numpy = self._way.convert, self._way.to_numpy
        first = np.asarray(to_numpy(self._call(self.state, convert(keys))))
        second = np.asarray(to_numpy(self._call(self.state, convert(keys[::-1].copy()))))[::-1]
        return int(len(keys) - len(np.unique(first)) + (first < 0).sum() + (first != second).sum())


def present(steps: Sequence[Step]) -> list[Int64]:
    """Return the distinct ids of every step, in random order."""
    rng = np.random.default_rng(0)
    return [rng.permutation(np.unique(step.ids)) for step in steps]


def fresh(rows: int, new: int, old: int, num_steps: int) -> list[Int64]:
    """Return batches of distinct ids, in random order if they repeat ids of earlier batches.

    new : number of ids in a batch that are neither in an earlier batch nor below ``old``
    """
    rng = np.random.default_rng(0)
    starts = range(old, old + new * num_steps, new)
    if new == rows:
        return [np.arange(start, start + new) for start in starts]
    repeated = [rng.choice(start, rows - new, replace=False, shuffle=False) for start in starts]
    added = [np.arange(start, start + new) for start in starts]
    return [rng.permutation(np.concatenate(both)) for both in zip(repeated, added, strict=True)]


class RandomLines:
    """The minimum memory traffic of a hash table: a random line of 64 bytes for each key of ``lookup``.

    num_bytes : of the array, in huge pages where the system provides them
    """

    def __init__(self, num_bytes: int, steps: Sequence[Step], threads: int) -> None:
        num_lines = num_bytes // LINE_BYTES
        memory = mmap.mmap(-1, num_lines * LINE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(memory, np.uint64)
        self._words[:] = 0  # touch every page before timing
        rng = np.random.default_rng(0)
        self._lines = [np.array_split(rng.integers(0, num_lines, len(ids)), threads) for ids in present(steps)]
        self._pool = ThreadPoolExecutor(threads)
        self._alone = threads == 1

    def prepare(self, steps: Sequence[int]) -> None:
        pass

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            if self._alone:
                memory_bandwidth.touch_lines(self._words, self._lines[number][0])
            else:
                list(
                    self._pool.map(lambda lines: memory_bandwidth.touch_lines(self._words, lines), self._lines[number])
                )


class Admissions(Ours):
    """New keys only: planned, and their initial rows drawn and written, without sums and without the update."""

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int) -> None:
        (self._size,) = workload.tables
        self._engine = turnover_engine(self._size.vocabulary_size, self._size.dim, threads, Dynamic())
        keys = [hashed(ids) for ids in fresh(self._size.rows, self._size.rows, 0, len(steps))]
        sums = [step.parts[self._size.name][1] for step in steps]
        self._sums = [Coalesced((SummedArrays(*arrays),)) for arrays in zip(keys, sums, strict=True)]
        self.prepare(range(1))
        self.run(range(1))
        self.num_wrong = int((self.table.read(keys[0]) != self.table.initial(keys[0])).any(axis=1).sum())

    def prepare(self, steps: Sequence[int]) -> None:
        """Forget all keys."""
        old = self._engine.core.tables.dynamic["table"]
        self.table = DynamicTable(old.spec, self._engine.core.tables.table("table"), 0, old.run, (0, 1))

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            self.table.plan([self._sums[number]], None, number, number)
            self.table.forget_changes()
            self.table.carry_out()

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return self.table.read(hashed(ids))


class Turnover(Ours):
    """Steps of a table of which 1 % of the keys are new each time; the others are among the younger half.

    policies : with eviction, expiry and sweeps, in a full table; else in a table with room for all of them
    num_steps : maximum number of steps
    """

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, policies: bool, num_steps: int) -> None:
        (self._size,) = workload.tables
        self._rows, self._new = workload.rows, max(1, int(TURNOVER * self._size.vocabulary_size))
        capacity, dynamic = self._size.vocabulary_size, Dynamic(evict="lru", expire_after=EXPIRE_AFTER)
        if not policies:
            capacity, dynamic = roomy(capacity + num_steps * self._new), Dynamic()
        self.engine = turnover_engine(capacity, self._size.dim, threads, dynamic)
        self._gradients, self._rng, self._known = steps[0].parts["table"][1], np.random.default_rng(0), 0
        # The first keys, a step apart, until evictions are near.
        full = self._size.vocabulary_size * 15 // 16
        while self._known < full:
            self._draw(min(self._rows, full - self._known))
            self.run(range(1))

    def prepare(self, steps: Sequence[int]) -> None:
        self._draw(min(self._new, self._rows))

    def _draw(self, num_new: int) -> None:
        known = self._known
        old = self._rng.integers(known // 2, max(known, 1), self._rows - num_new) if known else np.zeros(0, np.int64)
        new = np.resize(np.arange(known, known + num_new), self._rows - len(old))
        ids = self._rng.permutation(np.concatenate([new, old]))
        self._known = known + num_new
        self._next = hashed(ids), self._gradients

    def run(self, steps: Sequence[int]) -> None:
        if not self.engine.apply({"table": self._next}):
            raise RuntimeError("the step was not taken")

    @property
    def num_evicted(self) -> int:
        return int(self.engine.core.tables.dynamic["table"].directory.counts["evicted"])

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return self.engine.lookup(table, hashed(ids))


def turnover_engine(capacity: int, dim: int, threads: int, dynamic: Dynamic) -> Engine:
    """Return an engine with one dynamic table whose initial rows are drawn."""
    table = TableConfig(capacity, dim, name="table", dynamic=dynamic)
    return Engine(EmbeddingConfig.from_tables([table], Adagrad(0.01)), threads=threads)


def key_sides(
    kind: str, workload: Workload, steps: Sequence[Step], threads: int, ways: Sequence[KeyWay], rounds: int
) -> dict[str, Callable[[], Runner]]:
    """Return the sides of a case of keys by name, penstock first, as functions that create them.

    rounds : of ``take_turns``, one step each, including the warm-up
    """
    if kind == "admit":
        return {OURS: lambda: Admissions(workload, steps, threads)}
    if kind == "evict":
        return {
            name: lambda policies=policies: Turnover(workload, steps, threads, policies, rounds + 1)  # type: ignore[misc]
            for name, policies in ((OURS, True), (WITHOUT, False))
        }
    sides: dict[str, Callable[[], Runner]] = {
        way.name: lambda way=way: Numbering(way, workload, steps, kind)  # type: ignore[misc]
        for way in (directory_way(threads), *ways)
    }
    if kind == "lookup":
        size = Directory(roomy(workload.tables[0].vocabulary_size), 0, "", evict="lru").nbytes
        sides[LINES] = lambda: RandomLines(size, steps, threads)
    return sides
