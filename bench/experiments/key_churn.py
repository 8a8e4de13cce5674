"""Does memory stay flat while far more keys pass through a dynamic table than it has rows?

A stream of --rows rows brings --keys distinct keys to a table of --capacity rows (dim 1, Adagrad, LRU eviction). The
stream is created batch by batch: --keys/--rows of each step's rows are new keys, each once, and the others repeat an
earlier key. Half of those are within the last --capacity/2 new keys, where nearly all still have a row; the rest is
within the last 4 times --capacity, where most were evicted and come back.

It samples VmRSS and RssAnon of its own process after every step, and prints the maximum of every twentieth of the run.
The exit code is 1 if a twentieth after the table was full (the fourth at the earliest) exceeds the first of these by
more than 10 %. The keys of the report are compared with what the stream contained: the table is full, and every distinct
key was admitted at least once. Linux only.

    python bench/experiments/key_churn.py [--rows 1000000000] [--keys 300000000] [--capacity 10000000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.bench import machine
from penstock.bench.distributions import hashed

STEP_ROWS = 1 << 20
PARTS, LIMIT = 20, 1.10
FIRST_PART = 3  # the table is full by then


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000_000)
    parser.add_argument("--keys", type=int, default=300_000_000, help="distinct ones")
    parser.add_argument("--capacity", type=int, default=10_000_000)
    parser.add_argument("--min-count", type=int, default=1)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    for name, value in (machine.describe() | machine.versions(["penstock"])).items():
        print(f"{name:12} {value}")
    dynamic = ps.Dynamic(evict="lru", min_count=args.min_count)
    table = ps.TableConfig(args.capacity, 1, name="t", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], ps.Adagrad(0.01)), threads=args.threads)
    began, samples = time.perf_counter(), []

    def sampled(source: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Sample once per batch, with the number of rows so far."""
        rows = 0
        for batch in source:
            rows += batch.num_rows
            yield batch
            samples.append((rows, *resident()))

    report = engine.run(sampled(batches(args.rows, args.keys, args.capacity)), contribution_rows=STEP_ROWS)
    seconds = time.perf_counter() - began
    keys = report.tables["t"].keys
    assert keys is not None
    print(f"\n{report.rows:,} rows, {args.keys:,} distinct keys, {args.capacity:,} rows of capacity: {seconds:.0f} s")
    print(f"keys {keys.keys:,}, admitted {keys.admitted:,}, evicted {keys.evicted:,}, waiting {keys.waiting:,}")
    print(f"directory {keys.directory_bytes / 1e6:.1f} MB")
    right = report.rows == args.rows and keys.admitted - keys.evicted == keys.keys
    if args.min_count == 1:
        right = right and keys.admitted >= args.keys and keys.keys >= 0.9 * min(args.keys, args.capacity)
    if not right:
        print("WRONG: the report does not agree with the stream")
    flat = said(np.array(samples), args.rows)
    return 0 if flat and right else 1


def said(samples: np.ndarray, num_rows: int) -> bool:
    """Print the largest memory of every part of the run, and return whether it stayed flat once the table was full."""
    print(f"\n{'rows so far':>14} {'VmRSS MB':>10} {'RssAnon MB':>11}")
    part = np.minimum((samples[:, 0] - 1) * PARTS // num_rows, PARTS - 1)
    most = np.array([samples[part == n].max(axis=0) for n in range(PARTS) if (part == n).any()])
    for rows, resident_bytes, anonymous in most:
        print(f"{int(rows):14,} {resident_bytes / 1e6:10.1f} {anonymous / 1e6:11.1f}")
    later = most[FIRST_PART:, 1]
    ratio = later.max() / later[0]
    flat = bool(ratio <= LIMIT)
    print(f"\nVmRSS at most {ratio:.3f} times that of the fourth part (limit {LIMIT:.2f}): ", end="")
    print("does not grow" if flat else "GROWS")
    return flat


def batches(num_rows: int, num_keys: int, capacity: int) -> Iterator[pa.RecordBatch]:
    """Yield the stream: num_keys distinct keys, new ones spread evenly over num_rows rows."""
    rng = np.random.default_rng(0)
    gradients = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(STEP_ROWS, np.float32) * 0.01), 1)
    done = 0
    for first in range(0, num_rows, STEP_ROWS):
        rows = min(STEP_ROWS, num_rows - first)
        known = (first + rows) * num_keys // num_rows
        back = rng.random(rows - (known - done))
        near = len(back) // 2
        back[:near] *= capacity / 2
        back[near:] *= capacity * 4
        numbers = np.concatenate([np.arange(done, known), np.maximum(known - 1 - back.astype(np.int64), 0)])
        rng.shuffle(numbers)
        yield pa.RecordBatch.from_arrays([pa.array(hashed(numbers)), gradients.slice(0, rows)], ["id", "gradient"])
        done = known


def resident() -> tuple[int, int]:
    """Return VmRSS and RssAnon of this process, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if "kB" in line)
    return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


if __name__ == "__main__":
    sys.exit(main())
