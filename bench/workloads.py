"""The workloads of the bench: tables, and steps of gradient rows for them, deterministic by seed.

A step is one contribution of ``rows`` gradient rows, split into record batches of ``batch_rows``. Several distinct
steps are drawn and cycled, so that no cache or branch predictor memorizes one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.bench.distributions import Draw, Int64, hot, lognormal_uses, uniform, zipf

Float32 = npt.NDArray[np.float32]

SEED = 20260101
STEP_ROWS = 1 << 20
BATCH_ROWS = 1 << 15
GRADIENT_STDDEV = 0.01
ALIGNMENT = 64


@dataclass(frozen=True)
class TableSize:
    """One table, and the number of its rows in a step. draw : the distribution of its ids"""

    name: str
    vocabulary_size: int
    dim: int
    rows: int
    draw: Draw

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, without slots."""
        return 4 * self.vocabulary_size * self.dim


@dataclass(frozen=True)
class Workload:
    """Tables and the distribution of their gradients, which ``steps`` draws."""

    name: str
    title: str
    tables: tuple[TableSize, ...]
    num_steps: int
    batch_rows: int = BATCH_ROWS

    @property
    def rows(self) -> int:
        """Number of gradient rows in a step."""
        return sum(table.rows for table in self.tables)

    @property
    def step_bytes(self) -> int:
        """Bytes of the ids and gradients of one step."""
        return sum(t.rows * (8 + 4 * t.dim) for t in self.tables)

    @property
    def table_bytes(self) -> int:
        """Bytes of the weights of all tables."""
        return sum(t.num_bytes for t in self.tables)

    def steps(self) -> list[Step]:
        """Draw and return the distinct steps."""
        return [self._step(number) for number in range(self.num_steps)]

    def _step(self, number: int) -> Step:
        rng = np.random.default_rng([SEED, number])
        ids = aligned(self.rows, np.int64)
        values = aligned(sum(t.rows * t.dim for t in self.tables), np.float32)
        row = 0
        for table in self.tables:
            ids[row : row + table.rows] = table.draw(rng, table.rows, table.vocabulary_size)
            row += table.rows
        for start in range(0, len(values), 1 << 22):
            block = values[start : start + (1 << 22)]
            rng.standard_normal(out=block, dtype=np.float32)
            block *= np.float32(GRADIENT_STDDEV)
        return Step(self, ids, values)


@dataclass(frozen=True)
class Step:
    """The rows of one step, tables one after the other as a worker would emit them.

    ids : int64 (rows,); values : float32, the gradients of all rows end to end; both 64-byte aligned
    """

    workload: Workload
    ids: Int64
    values: Float32

    @cached_property
    def parts(self) -> dict[str, tuple[Int64, Float32]]:
        """Table → (ids (n,), gradients (n, dim)): views."""
        parts, row, value = {}, 0, 0
        for t in self.workload.tables:
            ids = self.ids[row : row + t.rows]
            parts[t.name] = ids, self.values[value : value + t.rows * t.dim].reshape(t.rows, t.dim)
            row, value = row + t.rows, value + t.rows * t.dim
        return parts

    @cached_property
    def num_unique(self) -> dict[str, int]:
        """Table → number of distinct ids."""
        return {name: len(np.unique(ids)) for name, (ids, _) in self.parts.items()}

    @cached_property
    def batches(self) -> list[pa.RecordBatch]:
        """The step as record batches that reference the arrays above."""
        whole = self._whole_batch()
        size = self.workload.batch_rows
        return [whole.slice(start, size) for start in range(0, whole.num_rows, size)]

    def _whole_batch(self) -> pa.RecordBatch:
        tables = self.workload.tables
        ids, values = pa.array(self.ids), pa.array(self.values)
        if len(tables) == 1:
            gradients = pa.FixedSizeListArray.from_arrays(values, tables[0].dim)
            return pa.RecordBatch.from_arrays([ids, gradients], ["id", "gradient"])
        # Dims differ between tables, and so do the lengths of the lists.
        offsets = np.zeros(len(self.ids) + 1, np.int32)
        np.cumsum(np.repeat([t.dim for t in tables], [t.rows for t in tables]), out=offsets[1:])
        codes = np.repeat(np.arange(len(tables), dtype=np.int32), [t.rows for t in tables])
        names = pa.DictionaryArray.from_arrays(codes, [t.name for t in tables])
        gradients = pa.ListArray.from_arrays(pa.array(offsets), values)
        return pa.RecordBatch.from_arrays([names, ids, gradients], ["table", "id", "gradient"])


def aligned(length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialized array, aligned to 64 bytes, which suits every side."""
    size = np.dtype(dtype).itemsize
    block = np.empty(length * size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + length * size].view(dtype)


# ---- the four workloads


def one_table(name: str, title: str, vocabulary_size: int, dim: int, rows: int, draw: Draw, num_steps: int) -> Workload:
    return Workload(name, title, (TableSize("table", vocabulary_size, dim, rows, draw),), num_steps)


def make(name: str, rows: int = STEP_ROWS, scale: float = 1.0) -> Workload:
    """Return one of ``WORKLOADS``. rows : of a step; scale : of the vocabularies"""
    vocabulary = {"w1": 10_000_000, "w2": 50_000_000, "w3": 1_000_000}
    size = max(1024, round(vocabulary.get(name, 0) * scale))
    if name == "w1":
        return one_table(name, "zipf 1.1 over one table of dim 32", size, 32, rows, zipf(1.1), 3)
    if name == "w2":
        return one_table(name, "uniform over one table of dim 16, hardly an id twice", size, 16, rows, uniform, 3)
    if name == "w3":
        # 10,000 hot ids for 2^20 rows; fewer ids for fewer rows, so that the reuse stays at about 105.
        draw = hot(max(1, rows * 10_000 // STEP_ROWS))
        return one_table(name, "10,000 hot ids of one table of dim 64", size, 64, rows, draw, 2)
    return dlrm(rows, scale)


DLRM_DIMS = (4, 8, 16, 16, 32, 32, 64, 128) * 4
DLRM_VOCABULARY = (1_341, 786_432)


def dlrm(rows: int, scale: float = 1.0) -> Workload:
    """Return 32 uneven tables: rows per table lognormal (sigma 1), uses per id lognormal, reuse about 7.6 overall.

    ``lognormal_uses`` models the published trace histograms, which are not shipped.
    """
    rng = np.random.default_rng(SEED)
    dims = rng.permutation(DLRM_DIMS)
    share = np.sort(rng.lognormal(0.0, 1.0, len(dims)))
    rows_of = np.floor(share / share.sum() * rows).astype(int)
    rows_of[-1] += rows - rows_of.sum()
    vocabulary = np.geomspace(*DLRM_VOCABULARY, len(dims)) * scale
    reuse = rng.normal(0.0, 0.6, len(dims))
    tables = [
        TableSize(f"table_{i:02}", max(64, int(vocabulary[i])), int(dims[i]), int(rows_of[i]), uses(float(reuse[i])))
        for i in rng.permutation(len(dims))
    ]
    return Workload("w4", "32 uneven tables like those of a DLRM", tuple(tables), 3)


def uses(shift: float) -> Draw:
    return lognormal_uses(0.78 + shift, 1.4)


WORKLOADS = ("w1", "w2", "w3", "w4")


def with_batches_of(workload: Workload, batch_rows: int) -> Workload:
    return replace(workload, batch_rows=batch_rows)
