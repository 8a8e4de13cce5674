"""Every allocation of an operation fails once, the n-th for n = 1 … all: what is left is as before, or all is done.

Run by tests/pyx/test_allocation.py with failing_malloc.c preloaded. Arrays of so many bytes that they are the kernels'
and NumPy's own; Python's objects come from pools that this does not touch.
"""

import ctypes
import sys

import numpy as np
from frame_way import Way, frames_of
from sanitize.updates import Tables

import penstock as ps
from penstock.base.threads import ThreadTeam
from penstock.checkpoint.dirty_rows import RowMarks
from penstock.core import pipeline
from penstock.core.pipeline import TableStore
from penstock.model.frames import Frame, Rows
from penstock.pyx import partition
from penstock.pyx.id_table import IdTable
from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan
from penstock.pyx.partition import locate

# Below this lie NumPy's iterators, which answer a refusal with a SystemError: a flaw of theirs.
LEAST_BYTES = 2048
ROWS, DIM, VOCABULARY = 3000, 8, 100_000
CAPACITY = 5 * 4096  # four virtual shards

process = ctypes.CDLL(None)
process.failing_arm.argtypes = [ctypes.c_long, ctypes.c_size_t]
process.failing_disarm.restype = ctypes.c_long


def main() -> int:
    failed = sum(every_allocation(name, *scenario()) for name, scenario in SCENARIOS.items())
    assert "jax" not in sys.modules
    print(f"{failed} allocations failed: MemoryError each, nothing half applied, the next call works")
    return 0


def every_allocation(name, make, work, look) -> int:
    """make() → a state; work(state) is what fails; look(state) → all that can be seen of it, as plain data."""
    before = look(make())
    whole = make()
    work(whole)
    after = look(whole)
    for number in range(1, 1000):
        state = make()
        process.failing_arm(number, LEAST_BYTES)
        try:
            work(state)
            failed = False
        except MemoryError:
            failed = True
        counted = process.failing_disarm()
        if not failed:
            assert counted < number or same(look(state), after), f"{name}: {number} was swallowed"
            assert same(look(state), after)
            if counted < number:
                return number - 1
            continue
        assert same(look(state), before), f"{name}: half applied where allocation {number} fails"
        work(state)
        assert same(look(state), after), f"{name}: continues wrongly after allocation {number} failed"
    raise AssertionError(f"{name}: no end")


def same(first, other) -> bool:
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(same(first[key], other[key]) for key in first)
    if isinstance(first, np.ndarray):
        return first.dtype == other.dtype and first.shape == other.shape and first.tobytes() == other.tobytes()
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(same, first, other))
    return first == other


def gradient(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, ROWS), rng.standard_normal((ROWS, DIM)).astype(np.float32)


def sparse(num_before):
    """A gradient into an accumulator that holds some."""

    def make():
        acc = ps.SparseConditionalAccumulator("float32", (VOCABULARY, DIM), "MEAN")
        for seed in range(num_before):
            acc.apply_gradient(*gradient(seed), local_step=0)
        return acc

    ids, values = gradient(99)
    return make, lambda acc: acc.apply_gradient(ids, values, local_step=0), lambda acc: acc.get_state()


def dense():
    def make():
        acc = ps.ConditionalAccumulator("float32", (ROWS, DIM), "MEAN")
        acc.apply_gradient(gradient(0)[1], local_step=0)
        return acc

    values = gradient(99)[1]
    return make, lambda acc: acc.apply_gradient(values, local_step=0), lambda acc: acc.get_state()


def taking():
    """A take that cannot be served leaves what was to be taken."""
    make = sparse(2)[0]

    def work(acc):
        work.taken = acc.take_gradient(2)

    return make, work, lambda acc: acc.get_state()


def frame(num_before):
    """The engine's sums: a frame of two tables, one mapped and one hashed, summed in parts."""
    pipeline.ROWS_WORTH_SPLITTING = ROWS
    vocabularies = {"mapped": VOCABULARY, "hashed": 2**30}
    frames = [Frame({t: (Rows(*gradient(n)),) * 2 for t in vocabularies}, 4 * ROWS, n) for n in range(num_before + 1)]

    def make():
        stores = {t: TableStore(n, DIM, accumulate=True, mean=True) for t, n in vocabularies.items()}
        state = pipeline.Pipeline(stores, ThreadTeam(4))
        for item in frames[:-1]:
            state.add(item)
        return state

    def look(state):
        stores = {
            t: [s.get_state(), s.accumulator.num_rows, s.accumulator.num_distinct] for t, s in state.stores.items()
        }
        return {"pipeline": state.get_state(), "stores": stores}

    return make, lambda state: state.add(frames[-1]), look


def drained():
    """Sums handed over in parts, with a mean: all of them or none."""
    make = frame(2)[0]

    def work(state):
        work.drained = state.stores["mapped"].drain()

    return make, work, frame(2)[2]


def placed():
    """Ids dealt to shards, and rows to devices: results are new arrays, nothing is held."""

    def work(state):
        ids, grads = gradient(5)
        locate(ids, VOCABULARY, 1024, True)
        rows = np.arange(len(ids), dtype=np.int32)
        cells, counts = rows * 0, np.zeros(2, np.int64)
        partition.destinations(ids, VOCABULARY, 1024, True, 512, 98, 1, 0, rows * 0, rows * 0, None, counts)
        lines = partition.number(rows, rows, cells)
        partition.group(rows, len(lines), rows * 0, cells, np.empty(len(ids), np.uint8))
        partition.lay(rows * 0, cells, 0, grads, np.empty((1, *grads.shape), np.int32))
        state["done"] = True

    return dict, work, dict


def marked():
    """Marks of rows."""

    def work(state):
        ids = np.unique(gradient(6)[0])
        rows = RowMarks(VOCABULARY, 1024)
        rows.begin(everything=True)
        state["changed"] = rows.change(ids)
        state["taken"] = rows.take_next(ROWS)

    def look(state):
        return state if "taken" in state else {}

    return dict, work, look


def mapped_ids():
    """The index of a table's ids, by a map and by a table that grows."""

    def work(state):
        ids = gradient(7)[0]
        table = IdTable()
        state["hashed"] = table.insert(ids)
        store = TableStore(VOCABULARY, DIM, accumulate=True, mean=True)
        state["store"] = store.get_state()

    return dict, work, lambda state: state if "store" in state else {}


def opened(number, threads=1, clock=lambda step: step, **policy):
    """An opening of a directory, planned and committed: new keys, candidates, removals in several shards."""
    policy = {"min_count": 2, "expire_after": 3, "evict": "lru"} | policy
    openings = [np.unique(np.random.default_rng(n).integers(0, 4 * CAPACITY, 2 * CAPACITY)) for n in range(number + 1)]
    team = ThreadTeam(threads)

    def make():
        directory = Directory(CAPACITY, 0, "t", **policy)
        for n, keys in enumerate(openings[:-1]):
            Plan(directory, keys, clock=clock(n), step=n, run=team.run).commit()
        return directory

    def work(directory):
        Plan(directory, openings[-1], clock=clock(number), step=number, run=team.run).commit()

    return make, work, Directory.get_state


def restored():
    """A saved directory into another one."""
    saved = opened(3)[0]().get_state()
    return opened(1)[0], lambda directory: directory.set_state(saved), Directory.get_state


def small_frames(known):
    """A run of small frames, whose ids are looked up in a map or hashed."""
    frames = frames_of([50] * 40, vocabulary=1000)

    def work(way):
        first = 0
        while first < 40:  # a call ends early where no memory is left to hash the next ids
            first += way.take(*frames, None, first=first)

    def look(way):
        return way.table().tobytes(), way.gate.global_step, way.sums.num_rows, way.sums.num_distinct, len(way.sums)

    return lambda: Way(known=known, vocabulary=1000), work, look


def step(rule, non_lazy):
    """An optimizer's step: a list of many segments, and a bit per row where it changes every row."""
    gradient = unique_gradient(8)
    pieces = [tuple(array[start : start + 30] for array in gradient) for start in range(0, 3000, 30)]

    def make():
        return Tables(rule, DIM, VOCABULARY, non_lazy=non_lazy, threads=3)

    def work(tables):
        tables.update(pieces)

    return make, work, lambda tables: [part.tobytes() for part in tables.parts]


def unique_gradient(seed):
    rng = np.random.default_rng(seed)
    return rng.permutation(VOCABULARY)[:ROWS], rng.standard_normal((ROWS, DIM)).astype(np.float32)


SCENARIOS = {
    "the first gradient": lambda: sparse(0),
    "a gradient more": lambda: sparse(1),
    "a gradient that makes it grow": lambda: sparse(3),
    "a dense gradient": dense,
    "a take": taking,
    "the first frame": lambda: frame(0),
    "a frame more": lambda: frame(1),
    "a frame that makes it grow": lambda: frame(3),
    "a table's sums": drained,
    "a run of small frames": lambda: small_frames(known=True),
    "a run of small frames of hashed ids": lambda: small_frames(known=False),
    "ids to shards and rows to devices": placed,
    "marks of rows": marked,
    "the index of a table's ids": mapped_ids,
    "the first opening of a directory": lambda: opened(0),
    "an opening that removes keys": lambda: opened(4),
    "an opening on several threads": lambda: opened(5, threads=3),
    "an opening that evicts by count": lambda: opened(4, evict="lfu", half_life=2),
    "an opening at a clock that stood still": lambda: opened(2, clock=lambda _: 7, min_count=1),
    "a directory restored": restored,
    "a step": lambda: step("adagrad", False),
    "a step that changes every row": lambda: step("adam", True),
}

if __name__ == "__main__":
    sys.exit(main())
