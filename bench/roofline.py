"""The memory limit of a step: the traffic that no implementation can avoid, at measured rates.

    coalesce   every id and gradient read once, the sums written once past the caches
    updates    every id and gradient read once, every touched row and its slots read and written once

It is a lower bound and not a forecast: it ignores id lookups, the adds of repeated ids, and everything but memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.bench import memory_bandwidth
from penstock.bench.contestants import AS_ADAGRAD, SLOTS
from penstock.bench.workloads import Step, TableSize, Workload

STREAM_BYTES = 1 << 28
TABLE_BYTES = (1 << 26, 1 << 32)  # of the table whose random rows are updated: minimum, maximum
NUM_ROWS = 1 << 18
REPEATS = 5


@dataclass(frozen=True)
class Rates:
    """Measured memory rates. read, write : bytes per second; update_s : row bytes → seconds per random row"""

    read: float
    write: float
    update_s: dict[int, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "read_gb_per_s": round(self.read / 1e9, 2),
            "write_gb_per_s": round(self.write / 1e9, 2),
            "update_mrows_per_s": {str(size): round(1e-6 / s, 2) for size, s in sorted(self.update_s.items())},
        }


def row_bytes(kind: str, table: TableSize) -> tuple[int, ...]:
    """Return the row sizes in bytes that determine the cost of ``kind``: of the weights, of a slot, and of all."""
    if kind == "coalesce":
        return ()
    weights = 4 * table.dim
    slot = 4 if kind == "rowwise_adagrad" else weights
    return weights, slot, weights + SLOTS[kind] * slot


def measure(workload: Workload, kinds: Sequence[str], threads: int, free_bytes: int) -> Rates:
    """Return the rates that the limits of these kinds need."""
    sizes = {size for kind in kinds for table in workload.tables for size in row_bytes(kind, table)}
    wanted = max((1 + SLOTS[kind]) * workload.table_bytes for kind in kinds)
    num_bytes = max(TABLE_BYTES[0], min(wanted, TABLE_BYTES[1], free_bytes // 4))
    with ThreadPoolExecutor(threads) as pool:
        stream = np.ones(STREAM_BYTES // 8, np.uint64)
        parts = np.array_split(stream, threads)
        read_s = best(pool, [lambda p=p: memory_bandwidth.read_stream(p) for p in parts])  # type: ignore[misc]
        write_s = best(pool, [lambda p=p: memory_bandwidth.write_stream(p, 1) for p in parts])  # type: ignore[misc]
        table = np.zeros(num_bytes // 4, np.float32)
        table += 1  # touch every page before timing
        updates = {size: update_s(pool, table, size // 4, threads) for size in sorted(sizes)}
    return Rates(STREAM_BYTES / read_s, STREAM_BYTES / write_s, updates)


def update_s(pool: ThreadPoolExecutor, table: Any, width: int, threads: int) -> float:
    """Return the seconds per random row of ``width`` floats; every thread updates a separate part of the table."""
    rng = np.random.default_rng(0)
    tasks = []
    for part in range(threads):
        part_table = table[part * (len(table) // threads) :][: len(table) // threads]
        rows = rng.integers(0, len(part_table) // width, NUM_ROWS // threads)
        tasks.append(lambda t=part_table, r=rows: memory_bandwidth.update_rows(t, r, width))
    return best(pool, tasks) / (NUM_ROWS // threads * threads)


def best(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds of the fastest repetition, as for any limit."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for future in [pool.submit(task) for task in tasks]:
            future.result()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def limit_ms(kind: str, step: Step, rates: Rates) -> float:
    """Return the limit of one step in milliseconds. AS_ADAGRAD count as Adagrad: their input is read once."""
    kind = "adagrad" if kind in AS_ADAGRAD else kind
    seconds = step.workload.step_bytes / rates.read
    for table in step.workload.tables:
        unique = step.num_unique[table.name]
        if kind == "coalesce":
            seconds += unique * (8 + 4 * table.dim) / rates.write
            continue
        # Slots in separate tables or next to the weights, whichever is faster on this machine.
        weights, slot, together = (rates.update_s[size] for size in row_bytes(kind, table))
        seconds += unique * min(weights + SLOTS[kind] * slot, together)
    return 1e3 * seconds
