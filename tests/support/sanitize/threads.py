"""Drives gate, pipeline, accumulators and kernels from many threads, for ThreadSanitizer to watch; see tsan.sh.

Only penstock's kernels are built with the sanitizer. It sees their reads and writes, and every lock and
condition of the process, the GIL's too; so it reports when two threads touch the same sums with no lock
or join between them. Neither jax nor pyarrow is loaded.

--break shows that it would: ``gate`` takes the gate's lock away, ``parts`` lets two threads fold the
same part; the first report then ends the process. The results are checked as well, where nothing is broken.
"""

import argparse
import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import penstock as ps
from penstock.base.threads import ThreadTeam
from penstock.core import pipeline
from penstock.core.gate import Gate
from penstock.core.pipeline import Pipeline, TableStore
from penstock.model.frames import Frame, Rows
from penstock.pyx import accumulator
from penstock.pyx.id_table import IdTable
from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan

PRODUCERS, TAKERS, GRADIENTS, ROWS, DIM = 6, 3, 40, 2000, 16


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--break", dest="broken", choices=("gate", "parts"))
    broken = arguments.parse_args().broken
    assert "tsan" in accumulator.__file__, f"not the sanitized build: {accumulator.__file__}"
    sys.setswitchinterval(1e-5)
    if broken != "parts":
        for dtype in ("float32", "float64"):
            sparse(dtype, broken)
        sparse("float16", broken)
        dense(broken)
    if broken != "gate":
        parts(broken)
        tables()
    if broken is None:
        keys()
    assert not {"jax", "pyarrow"} & set(sys.modules)
    print(f"tsan: everything ran{f', with {broken} broken' if broken else ', results are right'}")
    return 0


def sparse(dtype: str, broken: str | None) -> None:
    """Producers and takers on one accumulator; integers in float, so that sums are exact in any order."""
    acc = ps.SparseConditionalAccumulator(dtype, (500, DIM), "SUM")
    num = GRADIENTS if dtype != "float16" else 4
    sent, taken = np.zeros(500), np.zeros(500)
    made = [np.random.default_rng(n).integers(0, 500, ROWS) for n in range(PRODUCERS)]
    for ids in made:
        np.add.at(sent, ids, num)

    def produce(number: int) -> None:
        ones = np.ones((ROWS, DIM), dtype)
        for _ in range(num):
            acc.apply_gradient(made[number], ones, local_step=2**40, contributor=number)
            acc.explain()

    def take(results: list) -> None:
        with contextlib.suppress(ps.CancelledError):
            while True:
                with contextlib.suppress(ps.TakeTimeoutError):
                    results.append(acc.take_gradient(2, timeout=0.01))

    results: list = []
    together(acc, broken, [(produce, n) for n in range(PRODUCERS)], [(take, results)] * TAKERS)
    held = acc.get_state()["held"]
    if held:
        np.add.at(taken, held["ids"], held["values"][:, 0])
    for gradient in results:
        np.add.at(taken, gradient.indices, gradient.values[:, 0])
    assert broken or (taken == sent).all()


def dense(broken: str | None) -> None:
    acc = ps.ConditionalAccumulator("float32", (ROWS, DIM), "SUM")
    results: list = []

    def produce(number: int) -> None:
        for _ in range(GRADIENTS):
            acc.apply_gradient(np.full((ROWS, DIM), number, np.float32), local_step=2**40)

    def take(results: list) -> None:
        with contextlib.suppress(ps.CancelledError):
            while True:
                results.append(acc.take_gradient(3))

    together(acc, broken, [(produce, n) for n in range(PRODUCERS)], [(take, results)] * TAKERS)
    total = sum(float(value[0, 0]) for value in results)
    held = acc.get_state()["held"]
    total += float(held["value"][0, 0]) if held else 0
    assert broken or total == GRADIENTS * sum(range(PRODUCERS))


class Unlocked:
    """The context of a gate's changes without its lock."""

    def __init__(self, gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        completions, self._gate._completions = self._gate._completions, []
        for complete in completions:
            complete()


def together(acc, broken: str | None, producers: list, takers: list) -> None:
    """Run all; close the accumulator when the producers are done."""
    if broken == "gate":
        acc._gate.change = Unlocked(acc._gate)

    def guarded(work, *args) -> None:
        with contextlib.suppress(Exception) if broken else contextlib.nullcontext():
            work(*args)

    threads = [
        [threading.Thread(target=guarded, args=item, daemon=True) for item in side] for side in (producers, takers)
    ]
    for thread in threads[1] + threads[0]:
        thread.start()
    for thread in threads[0]:
        thread.join()
    acc.close()
    for thread in threads[1]:
        thread.join(10 if broken else None)  # without its lock a gate may forget a taker


def parts(broken: str | None) -> None:
    """Producers push frames of two tables through one pipeline, whose threads share the tables' parts as tasks."""
    pipeline.ROWS_WORTH_SPLITTING = 1 << 12
    sizes, wanted, results = {"mapped": 3000, "hashed": 2**30}, np.zeros(3000), np.zeros(3000)
    stores = {name: TableStore(size, DIM, accumulate=True, mean=False) for name, size in sizes.items()}
    frames = [
        [np.random.default_rng((producer, number)).integers(0, 3000, 20_000) for number in range(GRADIENTS // 4)]
        for producer in range(PRODUCERS)
    ]
    for ids in itertools.chain(*frames):
        np.add.at(wanted, ids, 2)

    def step() -> None:
        for item in itertools.chain(*line.drain().values()):
            for ids, sums in item.parts:
                results[ids % 3000] += sums[:, 0]

    gate, line = Gate(3), Pipeline(stores, ThreadTeam(16))

    def push(frame: Frame) -> None:
        line.add(frame)
        gate.count_contribution(None)
        if gate.is_due():
            step()
            gate.count_opening()

    if broken:
        line._work = lambda num_tasks, alone: twice(line, num_tasks)

    def produce(number: int) -> None:
        for ids in frames[number]:
            ones = np.ones((len(ids), DIM), np.float32)
            rows = {"mapped": (Rows(ids, ones),), "hashed": (Rows(ids + 3000 * 2**17, ones),)}
            gate.change(push, Frame(rows, 2 * len(ids)))

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line.team.close()
    assert broken or (gate.global_step == PRODUCERS * (GRADIENTS // 4) // 3 and (results == wanted).all())


def twice(line: Pipeline, num_tasks: int) -> bool:
    """Pipeline._work with the same tasks on two intakes' counters, so that two threads fold the same part."""
    begun = threading.Thread(target=line._intake.work)
    begun.start()
    line._intake.add()
    good = line.team.run([line._intake.work] * num_tasks)
    begun.join()
    return good


def tables() -> None:
    """One table per thread: nothing is shared behind the class."""

    def fill(seed: int) -> int:
        table = IdTable()
        for _ in range(20):
            table.insert(np.random.default_rng(seed).integers(0, 2**62, 5000))
        return len(table)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fill, range(4))) == [5000] * 4


def keys() -> None:
    """The directory of a dynamic table: keys found, and shards decided and changed, by several threads at once."""
    states = []
    for threads in (1, 4):
        policy = {"min_count": 2, "expire_after": 2, "evict": "lfu", "half_life": 2}
        directory, team = Directory(40_000, 0, "t", **policy), ThreadTeam(threads)
        for step in range(12):
            of_step = np.unique(np.random.default_rng(step).integers(4000 * step, 60_000 + 4000 * step, 40_000)) * 2**40
            dropped = Plan(directory, of_step, clock=step + 1, step=step + 1, run=team.run)
            dropped.cancel()
            Plan(directory, of_step, clock=step, step=step, run=team.run).commit()
        team.close()
        states.append({name: array.tolist() for name, array in directory.get_state().items() if name != "row"})
        assert directory.num_shards == 8
        assert min(directory.counts["evicted"], directory.counts["expired"]) > 1000
    assert states[0] == states[1]


if __name__ == "__main__":
    sys.exit(main())
