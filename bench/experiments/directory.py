"""What does the directory of a dynamic table cost? Runs on any machine; times are the least of --rounds.

1. Resolves: keys that all have a row, on one thread, against a loop that does nothing but read-modify-write one random
   line of 64 bytes of an array of the same bytes, in huge pages too, prefetched 16 ahead. Both in turns.
2. Admissions: keys that are all new, and their initial rows drawn, on several threads.
3. Bytes per key besides rows and slots, of a full directory.

    python bench/experiments/directory.py [--keys 10000000] [--batch 262144] [--rounds 20] [--threads 2] [--dim 16]
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from functools import partial

import numpy as np

from penstock.bench.memory_bandwidth import touch_lines
from penstock.pyx.initial_rows import draw
from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan
from penstock.tables.initializers import start_key
from penstock.threads import ThreadTeam


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1 << 18)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=16)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, args.keys)
    directory = Directory(int(args.keys * 1.1), 0, "bench", evict="lru")
    team = ThreadTeam(args.threads)
    admissions(directory, keys, team, args.dim)
    print(f"{directory.nbytes / directory.capacity:.1f} bytes per row of capacity; {len(directory):,} keys")
    resolves(directory, keys, args.batch, args.rounds)
    team.close()
    return 0


def admissions(directory: Directory, keys, team: ThreadTeam, dim: int) -> None:  # type: ignore[no-untyped-def]
    """Admit all keys in 16 batches, draw their rows, and print the best rate."""
    rates, key = [], start_key(0, "bench")
    for step, batch in enumerate(np.array_split(keys, 16)):
        out = np.zeros((len(batch), dim), np.float32)
        began = time.perf_counter()
        plan = Plan(directory, batch, clock=step, step=step, run=team.run)
        blocks = [slice(first, first + 4096) for first in range(0, len(batch), 4096)]
        tasks = [partial(draw, batch[at], key, True, 0.25, 0.0, out[at]) for at in blocks]
        team.run([lambda task=task: task() is None for task in tasks])  # type: ignore[misc]
        plan.commit()
        rates.append(len(batch) / (time.perf_counter() - began))
    print(f"admissions with rows of dim {dim} on {team.threads} threads: {max(rates) / 1e6:.2f} M/s")


def resolves(directory: Directory, keys, size: int, rounds: int) -> None:  # type: ignore[no-untyped-def]
    """Print the rates of resolving present keys and of the bare loop."""
    rng = np.random.default_rng(1)
    num_lines = directory.nbytes // 64
    memory = mmap.mmap(-1, num_lines * 64)
    memory.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(memory, np.uint64)
    words[:] = 0
    ours, bare = [], []
    for step in range(100, 100 + rounds):
        batch = np.unique(keys[rng.integers(0, len(keys), size)])
        rng.shuffle(batch)
        lines = rng.integers(0, num_lines, len(batch))
        began = time.thread_time()
        Plan(directory, batch, clock=step, step=step).commit()
        ours.append((time.thread_time() - began) / len(batch))
        began = time.thread_time()
        touch_lines(words, lines)
        bare.append((time.thread_time() - began) / len(batch))
    print(
        f"resolves on one thread: {1e-6 / min(ours):.1f} M/s; a random line each: {1e-6 / min(bare):.1f} M/s; ratio "
        f"{min(bare) / min(ours):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
