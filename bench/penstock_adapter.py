"""penstock's sides: with ``dynamic_tables``, the only module of this package that uses the Engine and its internals.

All sides use ``Engine.run`` over record batches in memory, with validation. ``contribution_rows`` splits the frames, so
that a step is one frame, independent of its batches. Only ``Coalesce``, which must stop before the device, connects a
reader, a gate and a pipeline directly, as the Engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.api.engine import Engine
from penstock.base.threads import ThreadTeam
from penstock.bench.contestants import ACCUMULATOR, BETA1, BETA2, EPSILON, RATE, WEIGHT, look_up
from penstock.bench.distributions import Int64
from penstock.bench.workloads import Float32, Step, Workload
from penstock.core.pipeline import Pipeline, TableStore
from penstock.core.trial_gate import TrialGate
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import Constant, TableConfig
from penstock.model.frames import Coalesced
from penstock.model.gate_policy import GatePolicy
from penstock.model.stats import Counters
from penstock.model.updates import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad


def roomy(num_keys: int) -> int:
    """Return a capacity at which no virtual shard overflows: shards of 4096 rows differ by 2 % in their keys."""
    return num_keys + num_keys // 8 + 1


def config_of(workload: Workload, kind: str) -> EmbeddingConfig:
    """Return the workload's tables with one optimizer and equal initial weights; dynamic tables for that kind."""
    optimizers: dict[str, Any] = {
        "sgd": lambda: SGD(RATE),
        "adagrad": lambda: Adagrad(RATE, initial_accumulator_value=ACCUMULATOR),
        "rowwise_adagrad": lambda: RowWiseAdagrad(learning_rate=RATE, initial_accumulator_value=ACCUMULATOR),
        "adam": lambda: Adam(RATE, beta_1=BETA1, beta_2=BETA2, epsilon=EPSILON, sum_inside_sqrt=False),
        "ftrl": lambda: FTRL(RATE, initial_accumulator_value=ACCUMULATOR),
    }
    optimizer = optimizers.get(kind, optimizers["adagrad"])()
    by_key = kind == "dynamic"
    tables = [
        TableConfig(
            roomy(t.vocabulary_size) if by_key else t.vocabulary_size,
            t.dim,
            Constant(WEIGHT),
            name=t.name,
            dynamic=Dynamic() if by_key else None,
        )
        for t in workload.tables
    ]
    return EmbeddingConfig.from_tables(tables, optimizer)


class Ours:
    """Base of penstock's sides, which do all their work in ``run``."""

    def prepare(self, steps: Sequence[int]) -> None:
        pass


class Update(Ours):
    """``Engine.run`` over batches in memory, or over a file of them."""

    def __init__(self, workload: Workload, kind: str, steps: Sequence[Step], threads: int) -> None:
        self.engine = Engine(config_of(workload, kind), threads=threads)
        self._steps, self._rows = steps, workload.rows

    def run(self, steps: Sequence[int]) -> None:
        self._apply(batches_of(self._steps, steps), len(steps))

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return self.engine.lookup(table, ids)

    def _apply(self, source: Any, num_steps: int) -> None:
        report = self.engine.run(source, contribution_rows=self._rows)
        if report.steps != num_steps or report.dropped:
            raise RuntimeError(f"expected {num_steps} steps of whole frames, got {report}")


class Replay(Update):
    """``Engine.run`` over an Arrow IPC file in the page cache: all distinct steps in one file."""

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, folder: Path) -> None:
        super().__init__(workload, "adagrad", steps, threads)
        every = tuple(range(len(steps)))
        # A file with only the first step is for the check.
        self._files: dict[tuple[int, ...], Path] = {(0,): folder / "first.arrow", every: folder / "steps.arrow"}
        for numbers, path in self._files.items():
            write_file(path, batches_of(steps, numbers))

    def run(self, steps: Sequence[int]) -> None:
        self._apply(str(self._files[tuple(steps)]), len(steps))


class Coalesce(Ours):
    """Reads, validates and coalesces, and stops there: an Engine without devices.

    It connects reader → gate → pipeline, as ``Engine.__init__`` and ``Engine.run`` do.
    """

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int) -> None:
        config = config_of(workload, "sgd")
        self._steps = steps
        self._options = ReadOptions(config.id_ranges, contribution_rows=workload.rows, unvalidated=True)
        self._last: Mapping[str, list[Coalesced]] = {}
        stores = {
            spec.name: TableStore(spec.vocabulary_size, spec.dim, accumulate=spec.accumulate, mean=True)
            for spec in config.tables
        }
        self._pipeline = Pipeline(stores, ThreadTeam(threads))
        self._trial = TrialGate(GatePolicy(), self._pipeline, self._take)

    def run(self, steps: Sequence[int]) -> None:
        counters = Counters()
        for frame in FrameReader(batches_of(self._steps, steps), self._options):
            counters.count(*self._trial.admit(frame))
            self._trial.open()

    def read_rows(self, table: str, ids: Int64) -> Float32:
        (coalesced,) = self._last[table]
        unique, sums = (np.concatenate(arrays) for arrays in zip(*coalesced.parts, strict=True))
        return look_up(unique, sums, ids)

    def _take(self) -> None:
        self._last = self._pipeline.drain()


def batches_of(steps: Sequence[Step], numbers: Sequence[int]) -> Iterator[pa.RecordBatch]:
    return (batch for number in numbers for batch in steps[number].batches)


def write_file(path: Path, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with pa.ipc.new_file(str(path), first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


class Latency(Ours):
    """Runs small steps: ``how`` is "run" (a stream of them), "apply" (one call each) or "bare".

    "bare" is the smallest JAX call: a jitted function that donates an array of the table's shape and returns it with
    one number changed.
    """

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, how: str) -> None:
        self._steps, self._rows, self._how = steps, workload.rows, how
        self._table = workload.tables[0].name
        if how == "bare":
            import jax
            import jax.numpy as jnp

            (t,) = workload.tables
            self._array = jax.jit(lambda: jnp.full((t.vocabulary_size, 2, t.dim), WEIGHT, jnp.float32))()
            element = jnp.zeros((1, 1, 1), jnp.float32)
            # A slice update and no scatter: for a scatter of one number, XLA copies the array on a CPU.
            change = partial(jax.lax.dynamic_update_slice, update=element, start_indices=(0, 0, 0))
            self._call = jax.jit(change, donate_argnums=0)
        else:
            self.engine = Engine(config_of(workload, "adagrad"), threads=threads)

    def run(self, steps: Sequence[int]) -> None:
        if self._how == "run":
            self.engine.run(batches_of(self._steps, steps), contribution_rows=self._rows)
        elif self._how == "apply":
            for number in steps:
                self.engine.apply(self._steps[number].parts)
            self.engine.lookup(self._table, np.zeros(1, np.int64))  # waits for the device
        else:
            for _ in steps:
                self._array = self._call(self._array)
            self._array.block_until_ready()

    def read_rows(self, table: str, ids: Int64) -> Float32:
        return self.engine.lookup(table, ids)
