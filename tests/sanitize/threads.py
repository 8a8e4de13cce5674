"""Drives gate, accumulators and kernels from many threads, for ThreadSanitizer to watch; see tsan.sh.

Only penstock's kernels are built with the sanitizer. It sees their reads and writes, and every lock and
condition of the process, the GIL's too; so it reports when two threads touch the same sums with no lock
or join between them. Neither jax nor pyarrow is loaded.

--break shows that it would: ``gate`` takes the gate's lock away, ``parts`` lets two threads fold the
same part; the first report then ends the process. The results are checked as well, where nothing is broken.
"""

import argparse
import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import penstock as ps
from penstock.pyx import accumulator
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.id_table import IdTable

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


def unlocked(gate, change):
    """Gate._change without its lock."""
    result = change()
    gate._serve()
    return result


def together(acc, broken: str | None, producers: list, takers: list) -> None:
    """Run all; close the accumulator when the producers are done."""
    if broken == "gate":
        acc._gate._change = lambda change: unlocked(acc._gate, change)

    def guarded(work, *args) -> None:
        with contextlib.suppress(Exception) if broken else contextlib.nullcontext():
            work(*args)

    threads = [
        [threading.Thread(target=guarded, args=one, daemon=True) for one in side] for side in (producers, takers)
    ]
    for thread in threads[1] + threads[0]:
        thread.start()
    for thread in threads[0]:
        thread.join()
    acc.close()
    for thread in threads[1]:
        thread.join(10 if broken else None)  # without its lock a gate may forget a taker


def parts(broken: str | None) -> None:
    """One block's rows added in parts by a pool, as the pipeline does, frame after frame."""
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        acc = Accumulator(DIM, dtype, vocabulary_size=3000)
        wanted = np.zeros(3000)
        with ThreadPoolExecutor(4) as pool:
            for frame in range(10):
                ids = rng.integers(0, 3000, 20_000)
                np.add.at(wanted, ids, 1)
                acc.begin([(ids, np.ones((len(ids), DIM), dtype), None)], frame, 4)
                shares = [part // 2 for part in range(4)] if broken else range(4)
                for done in [pool.submit(acc.add_part, share, frame) for share in shares]:
                    done.result()
                acc.end()
        ids, sums, _ = acc.drain(ascending=True)
        assert broken or (sums[:, 0] == wanted[ids]).all()


def tables() -> None:
    """One table per thread: nothing is shared behind the class."""

    def fill(seed: int) -> int:
        table = IdTable()
        for _ in range(20):
            table.insert(np.random.default_rng(seed).integers(0, 2**62, 5000))
        return len(table)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fill, range(4))) == [5000] * 4


if __name__ == "__main__":
    sys.exit(main())
