"""Prints the path of a batch from its source into a table: ``python tests/support/path_of_a_batch.py [ROWS]``.

A run reads a plain Arrow IPC stream of batches of ROWS rows, a frame each, from a file into one table on the CPU, and
the gate opens for every frame. Small frames pass in native code, those of several batches at once; large ones one by
one, their rows on several threads. The path is that of a batch in the middle. It begins when the run asks the reader
for the next frame, and ends when the native code returns that has updated the rows. A repeated call is printed once.

What counts, by ``sys.setprofile`` on the thread of the run:

- modules: every module of penstock of which a Python function runs on the path, no matter which function calls it, or
  is on the stack meanwhile, such as ``engine.py`` and ``run.py``. Compiled kernels do not count: the profiler does not
  see them.
- stack frames: the most Python functions of penstock that are on the stack at a time, ``Engine.run`` being the first;
  comprehensions are functions in Python 3.11. Functions of jax and pyarrow do not count.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROWS, DIM, BATCHES = 1000, 8, 100
MOST_IDS = 10_000
SMALL_ROWS = 4096  # of pyx/frame_steps.pyx, which is not imported before the path begins
READER, UPDATE_SMALL, UPDATE = "penstock.io.decoding.reader", "Pipeline.add_run", "HostTables._run"


class Call(NamedTuple):
    """A call of a function of penstock. depth : of the stack with it, from ``Engine.run`` on"""

    depth: int
    module: str
    function: str


class Profiler:
    """Collects the paths of all batches. run : the code of ``Engine.run``; update : the function that ends a path"""

    def __init__(self, run, update) -> None:
        self._run, self._update = run, update
        self._path = []
        self.paths = []

    def __call__(self, frame, event, _) -> None:
        module = module_of(frame)
        if event == "return" and frame.f_code.co_qualname == self._update and self._path:
            self.paths.append(self._path)
            self._path = []
        elif event == "call" and module.startswith("penstock"):
            stack = self._stack(frame)
            if module == READER and READER not in [call.module for call in stack[:-1]]:
                self._path = stack[:-1]
            if self._path:
                self._path.append(stack[-1])

    def _stack(self, frame):
        """Return the calls of penstock's functions from Engine.run to a frame."""
        results = []
        while frame is not None and frame.f_code is not self._run:
            if module_of(frame).startswith("penstock"):
                results.append(frame)
            frame = frame.f_back
        if frame is not None:
            results.append(frame)
        return [Call(depth, module_of(f), f.f_code.co_qualname) for depth, f in enumerate(reversed(results), 1)]


def module_of(frame) -> str:
    return frame.f_globals.get("__name__", "")


def path_of_a_batch(rows):
    """Return the calls on the path of one batch of so many rows, in order."""
    import penstock as ps
    from penstock.engine import Engine

    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(MOST_IDS, DIM, name="t")], ps.Adagrad(0.1))
    engine = ps.Engine(config, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.arrows"
        write_stream(path, rows)
        profiler = Profiler(Engine.run.__code__, UPDATE_SMALL if rows <= SMALL_ROWS else UPDATE)
        sys.setprofile(profiler)
        try:
            report = engine.run(path)
        finally:
            sys.setprofile(None)
    assert report.steps == BATCHES
    assert len(profiler.paths) >= 3
    return profiler.paths[len(profiler.paths) // 2]


def write_stream(path, rows=ROWS) -> None:
    import numpy as np
    import pyarrow as pa

    schema = pa.schema({"id": pa.int64(), "gradient": pa.list_(pa.float32(), DIM)})
    rng = np.random.default_rng(0)
    with pa.ipc.new_stream(str(path), schema) as writer:
        for _ in range(BATCHES):
            gradients = pa.array(rng.standard_normal(rows * DIM, np.float32))
            ids = pa.array(rng.integers(0, MOST_IDS, rows))
            columns = [ids, pa.FixedSizeListArray.from_arrays(gradients, DIM)]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def main() -> int:
    path = path_of_a_batch(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
    for call in dict.fromkeys(path):
        print(f"{call.depth:2} {'  ' * call.depth}{call.module.removeprefix('penstock.')}: {call.function}")
    modules = sorted({call.module.removeprefix("penstock.") for call in path})
    print(f"{len(modules)} modules: {', '.join(modules)}")
    print(f"{max(call.depth for call in path)} stack frames")
    return 0


if __name__ == "__main__":
    sys.exit(main())
