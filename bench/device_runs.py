"""Engines on a device: settings that must not change a bit do not change one.

Each check compares two states by their hashes. All runs have the same frames, of a skewed distribution, and Adagrad.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
import pyarrow as pa
from jax.sharding import Mesh

from penstock.api.engine import Engine
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.placement import ON_DEVICES, Placement
from penstock.model.config.tables import TableConfig
from penstock.model.updates import Adagrad
from penstock.rows.bridge.devices import AXIS

ROWS, DIM, NUM_FRAMES, FRAME_ROWS = 50_000, 32, 8, 8192
CACHED_BYTES = 4 << 20  # room for a third of the rows: some are evicted


@dataclass(frozen=True)
class EngineRun:
    """One run over the frames. cut_rows : of a record batch; restored_after : frames before a commit and a restore"""

    mesh: Mesh
    threads: int | None = None
    placement: Placement = ON_DEVICES
    dtype: str = "float32"
    dynamic: Dynamic | None = None
    cut_rows: int = FRAME_ROWS
    restored_after: int = 0

    @property
    def config(self) -> EmbeddingConfig:
        table = TableConfig(ROWS, DIM, name="t", dtype=self.dtype, dynamic=self.dynamic, placement=self.placement)
        return EmbeddingConfig.from_tables([table], optimizer=Adagrad(0.1))

    def state(self) -> str:
        """Return the hash of the state after all frames."""
        rows = log(self.dynamic is not None)
        engine = Engine(self.config, mesh=self.mesh, seed=1, threads=self.threads)
        if not self.restored_after:
            engine.run(rows.to_reader(self.cut_rows))
            return engine.state_hash()
        split = self.restored_after * FRAME_ROWS
        engine.run(rows[:split].to_reader(self.cut_rows))
        with tempfile.TemporaryDirectory() as folder:
            engine.save(folder)
            engine = Engine.restore(folder, mesh=self.mesh, config=self.config)
            engine.run(rows[split:].to_reader(self.cut_rows))
            return engine.state_hash()


def checks(mesh: Mesh, faults: list[str]) -> Iterator[str]:
    """Yield a line for each pair of runs; those whose states differ are faults."""
    usual = EngineRun(mesh)
    on_cpu = EngineRun(Mesh(np.asarray(jax.devices("cpu")[:1]), (AXIS,)))
    cached = replace(usual, placement=Placement("cached", device_bytes=CACHED_BYTES))
    keys = replace(usual, dynamic=Dynamic())
    small = replace(usual, dtype="bfloat16")
    pairs = {
        "the same run twice": (usual, usual),
        "one and four threads": (replace(usual, threads=1), replace(usual, threads=4)),
        "frames in one batch and in batches of 1,000 rows": (usual, replace(usual, cut_rows=1000)),
        "unbroken, and restored from a commit after five frames": (usual, replace(usual, restored_after=5)),
        "all rows on the device, and a cache of a third": (usual, cached),
        "cached, and restored": (cached, replace(cached, restored_after=5)),
        "rows on the host of this device, and on a CPU": (replace(usual, placement=Placement("host")), on_cpu),
        "keys of a dynamic table, and restored": (keys, replace(keys, restored_after=5)),
        "weights of 16 bits, and restored": (small, replace(small, restored_after=5)),
    }
    states: dict[EngineRun, str] = {}
    for title, (first, second) in pairs.items():
        try:
            state = states.setdefault(first, first.state())
            equal = state == second.state()
            problem = "" if equal else "states differ"
        except Exception as error:  # a fault of the device or of penstock: the page names it, and the rest runs
            problem = str(error).partition("\n")[0] or type(error).__name__
        faults += [f"{title}: {problem}"] if problem else []
        yield f"- {title}: {problem or 'equal states'}"


def log(has_keys: bool) -> pa.Table:
    """Return the gradient rows of all frames. has_keys : ids of all 64 bits"""
    rng = np.random.default_rng(4)
    num_rows = NUM_FRAMES * FRAME_ROWS
    ids = rng.zipf(1.2, num_rows).astype(np.uint64) % np.uint64(ROWS)
    ids = ids * np.uint64(0x9E3779B97F4A7C15) if has_keys else ids
    gradients = rng.standard_normal(num_rows * DIM, np.float32)
    columns = {
        "step": np.arange(num_rows) // FRAME_ROWS,
        "id": ids.astype(np.int64),
        "gradient": pa.FixedSizeListArray.from_arrays(gradients, DIM),
    }
    return pa.table(columns)
