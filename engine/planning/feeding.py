"""A model of how many threads of a host keep a TPU busy: what a chip updates, and what a thread sums and lays out.

The rates of chips are declared: published bandwidths and clocks, and the instructions that the compiler issues. No
chip has confirmed them. Those of a thread were measured on one machine (``bench/feed_rates.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.bridge.row_format import WITHOUT_KERNEL
from penstock.bridge.sharding import Layout
from penstock.config.specs import TableSpec

# The share of its time that a chip is to be busy.
BUSY = 0.8
# The clock cycles in which the kernel of ``pallas`` issues the copies of a line, of one array and of each further one,
# by the compiler's listing (docs/tpu.md).
CYCLES, CYCLES_OF_FURTHER = 20.2, 13.8
# Rows that a SparseCore copies by number in a second: 4.19 million in 4.05 ms on the four of a TPU 7x, as published.
COPIED_ROWS = 4.19e6 / 4.05e-3 / 4
# Nanoseconds of a thread, and more for each byte of a row: to sum a row, and to lay out the sum of an id.
SUM_NS, SUM_NS_OF_BYTE = 22.0, 0.18
LAYOUT_NS = {"pallas": 46.0, "sparsecore": 29.0}
LAYOUT_NS_OF_BYTE = 0.15


class Generation(NamedTuple):
    """What a chip has. bandwidth : of its HBM, bytes/s; clock : of a TensorCore, Hz; sparse_cores : for the variant"""

    bandwidth: float
    clock: float
    sparse_cores: int


GENERATIONS = {
    "v4": Generation(1.228e12, 1.05e9, 0),
    "v5e": Generation(0.819e12, 1.5e9, 0),
    "v5p": Generation(2.765e12, 1.75e9, 4),
    "v6e": Generation(1.64e12, 1.75e9, 2),
    "tpu7x": Generation(7.38e12, 1.75e9, 4),
}


class Device(NamedTuple):
    """Chips of one host. generation : a key of GENERATIONS"""

    generation: str
    chips: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """Return the device that a name such as "v5e-8" means. Raises ValueError."""
        match = re.fullmatch(rf"({'|'.join(GENERATIONS)})-([1-9]\d{{0,3}})", text)
        if match is None:
            raise ValueError(f"expected one of {', '.join(GENERATIONS)} and a number of chips, such as v5e-8")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True)
class Need:
    """How a table feeds a device by one variant.

    chip_rows : distinct rows/s of each chip at most; bound : what limits it, "issue" (of copies) or "memory"
    thread_rows : distinct rows/s that a thread sums and lays out
    threads : that keep all chips busy for BUSY of the time, as if each further thread did as much as the first
    """

    table: str
    variant: str
    chip_rows: float
    bound: str
    thread_rows: float
    threads: int


def needs(specs: Sequence[TableSpec], device: Device, uses: float = 1) -> Iterator[Need]:
    """Yield the needs of each table that a kernel updates, by each variant that can.

    uses : how often a step has each row that it updates
    """
    chip = GENERATIONS[device.generation]
    for spec in specs:
        if spec.storage_dtype == "bfloat16" or spec.placement.where == "host":
            continue
        line = Layout(spec.name, spec.vocabulary_size, spec.dim, spec.rule.num_slots, device.chips, True, 128).line
        cycles = CYCLES + CYCLES_OF_FURTHER * (len(line.groups) - 1)
        limits = {"pallas": (chip.clock / cycles, chip.bandwidth / (2 * line.nbytes(1) + 4 * line.width + 4))}
        lanes = 16 if device.generation == "tpu7x" else 8  # as in pallas/sparsecore.py, also the pieces of a row
        if chip.sparse_cores and spec.dim <= line.lanes and spec.dim % lanes == 0:
            pieces = spec.dim // (spec.dim & -spec.dim)
            copies = 2 * (pieces + spec.rule.num_slots * (1 if spec.rule.row_slots else pieces))
            row = 4 * (3 * spec.dim + 2 * spec.rule.num_slots * spec.rule.slot_dim(spec.dim)) + 4
            limits["sparsecore"] = chip.sparse_cores * COPIED_ROWS / copies, chip.bandwidth / row
        for variant, (issue, memory) in limits.items():
            if spec.rule.algorithm in WITHOUT_KERNEL[variant]:
                continue
            thread_rows = 1e9 / nanoseconds(variant, spec.dim, uses)
            rows = min(issue, memory)
            threads = math.ceil(BUSY * rows * device.chips / thread_rows)
            yield Need(spec.name, variant, rows, "issue" if issue < memory else "memory", thread_rows, threads)


def nanoseconds(variant: str, dim: int, uses: float) -> float:
    """Return the time in which a thread sums ``uses`` rows of an id, and lays out their sum."""
    num_bytes = 4 * dim
    return uses * (SUM_NS + SUM_NS_OF_BYTE * num_bytes) + LAYOUT_NS[variant] + LAYOUT_NS_OF_BYTE * num_bytes
