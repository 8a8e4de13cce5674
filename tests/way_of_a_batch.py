"""Prints the way of one batch from its source into a table: ``python tests/way_of_a_batch.py``.

A run reads a plain Arrow IPC file of a few batches, a frame each, into one table on the CPU; the gate opens for every
frame. The way is that of a batch in the middle. It begins when the run asks the reader for the next frame, and ends
with the call that updates the table's rows.

What counts, by ``sys.setprofile`` on the thread of the run:

- modules: every module of penstock of which a Python function runs on the way, wherever it is called from, and every
  module of penstock whose function is on the stack meanwhile, ``engine.py`` and ``run.py`` among them. A kernel counts
  where Python calls a method of one of its classes; the profiler does not see calls of its functions, nor what kernels
  call themselves.
- frames: the most Python functions of penstock that are on the stack at a time, ``Engine.run`` being the first. Those
  of jax and pyarrow do not count.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROWS, DIM, BATCHES = 1000, 8, 6
READER = "penstock.io.decoding.reader"
KERNEL = "penstock.pyx.update"


class Way:
    """Records the events of the way: (depth, module, function), the depth below and with ``Engine.run``."""

    def __init__(self, run) -> None:
        self._run = run  # the code of Engine.run
        self._way = []
        self.ways = []

    def __call__(self, frame, event, argument) -> None:
        if event != "call":
            return
        module = module_of(frame)
        if module.startswith("jax") and module_of(frame.f_back).startswith("penstock.bridge") and self._way:
            self.ways.append(self._way)
            self._way = []
        if not module.startswith("penstock"):
            return
        stack = self._stack(frame)
        if module == READER and READER not in [name for name, _ in stack[:-1]]:
            self._way = list(enumerate(stack[:-1], 1))
        if self._way:
            self._way.append((len(stack), stack[-1]))

    def _stack(self, frame):
        """Return (module, function) of every function of penstock on the stack, from Engine.run on."""
        found = []
        while frame is not None:
            module = module_of(frame)
            if module.startswith("penstock"):
                found.append((module, frame.f_code.co_qualname))
            if frame.f_code is self._run:
                return found[::-1]
            frame = frame.f_back
        return []


def module_of(frame) -> str:
    return frame.f_globals.get("__name__", "") if frame else ""


def measured():
    """Return the way of a batch: a list of (depth, module, function)."""
    import numpy as np
    import pyarrow as pa

    import penstock as ps
    from penstock.engine import Engine

    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(10 * ROWS, DIM, name="t")], ps.Adagrad(0.1))
    engine = ps.Engine(config, threads=1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.arrows"
        batches = [batch_of(pa, rng) for _ in range(BATCHES)]
        with pa.ipc.new_stream(str(path), batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        way = Way(Engine.run.__wrapped__.__code__)
        sys.setprofile(way)
        try:
            report = engine.run(path)
        finally:
            sys.setprofile(None)
    assert report.steps == BATCHES
    return way.ways


def batch_of(pa, rng):
    gradients = pa.array(rng.standard_normal(ROWS * DIM).astype("float32"))
    arrays = [pa.array(rng.integers(0, 10 * ROWS, ROWS)), pa.FixedSizeListArray.from_arrays(gradients, DIM)]
    return pa.record_batch(arrays, ["id", "gradient"])


def main() -> int:
    ways = measured()
    for w in ways: print(len(w), len({m for _,(m,_) in w}), max(d for d,_ in w))
    for depth, (module, function) in ways[3]:
        print(f"{depth:3} {module.removeprefix('penstock.'):36} {function}")
    print(sorted({m for _,(m,_) in ways[3]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
