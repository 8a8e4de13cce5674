"""Synchronous replicas: workers send gradients as Arrow, a step applies one frame of each, stale ones are dropped.

TensorFlow's SyncReplicasOptimizer has an accumulator per variable; here one gate serves all tables:

- every worker computes on the tables of the current step, writes an Arrow IPC stream into its pipe, and waits for
  the next step; some workers also resend a gradient of an earlier step;
- a thread per worker reads the stream and pushes each batch to ``engine.gate`` as a frame of its step;
- the gate opens when it has one fresh frame of every worker. A frame of an earlier step is stale: dropped and counted.

The frames of a step arrive in any order. The gradients are whole numbers, whose sums do not depend on the order. So the
tables must equal, bit for bit, those of the same frames applied sequentially, which the example checks.

    python examples/sync_replicas.py
"""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pyarrow as pa

import penstock as ps

WORKERS, STEPS, VOCABULARY, DIM = 4, 12, 1000, 8
SCHEMA = pa.schema({"id": pa.int64(), "gradient": pa.list_(pa.float32(), DIM), "step": pa.int64()})


def main() -> int:
    engine = new_engine()
    turn = Turn(engine)
    threads = []
    for worker in range(WORKERS):
        out_of, into = os.pipe()
        threads.append(threading.Thread(target=work, args=(worker, os.fdopen(into, "wb"), turn)))
        threads.append(threading.Thread(target=receive, args=(worker, os.fdopen(out_of, "rb"), engine, turn)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    stale = engine.gate.stale
    print(f"{WORKERS} workers, {engine.global_step} steps, {stale.total} stale frames")
    print(f"  by worker:         {dict(sorted(stale.by_contributor.items()))}")
    print(f"  by steps behind:   {dict(sorted(stale.by_lateness.items()))}")
    print(f"  the gate now:      {engine.gate.explain()}")
    same = engine.state_hash() == one_after_the_other().state_hash() and not turn.failed
    print("the tables equal those of the sequential computation" if same else "THE TABLES DIFFER")
    return 0 if same else 1


def new_engine() -> ps.Engine:
    table = ps.TableConfig(VOCABULARY, DIM, name="words")
    return ps.Engine(ps.EmbeddingConfig.from_tables([table], ps.Adagrad(0.1)), num_required=WORKERS)


def gradient(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of a worker at a step: ids (n,) with repeats, rows (n, DIM) of whole numbers."""
    rng = np.random.default_rng((worker, step))
    return rng.integers(0, VOCABULARY, 64), rng.integers(-8, 9, (64, DIM)).astype(np.float32)


def lateness(worker: int, step: int) -> int:
    """Return the age in steps of the gradient that a worker resends at a step; 0: none."""
    return step % 3 if worker % 2 and step % 3 <= step else 0


class Turn:
    """A condition on which workers wait for the end of a step."""

    def __init__(self, engine: ps.Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self.failed = False

    def wait_for(self, step: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._engine.global_step >= step or self.failed, timeout=60):
                raise TimeoutError(f"step {step} did not come: {self._engine.gate.explain()}")

    def tell(self, failed: bool = False) -> None:
        with self._changed:
            self.failed |= failed
            self._changed.notify_all()


def work(worker: int, pipe, turn: Turn) -> None:
    """Run a worker: write its gradients of every step as an Arrow IPC stream."""
    with pipe, pa.ipc.new_stream(pipe, SCHEMA) as stream:
        for step in range(STEPS):
            turn.wait_for(step)
            late = lateness(worker, step)
            for sent_step in [step - late, step] if late else [step]:
                stream.write_batch(as_arrow(*gradient(worker, sent_step), sent_step))
            pipe.flush()


def as_arrow(ids: np.ndarray, rows: np.ndarray, step: int) -> pa.RecordBatch:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), DIM)
    return pa.record_batch([pa.array(ids), lists, pa.array([step] * len(ids))], schema=SCHEMA)


def receive(worker: int, pipe, engine: ps.Engine, turn: Turn) -> None:
    """Read the stream of one worker, and push every batch as a frame."""
    failed = True
    try:
        with pipe, pa.ipc.open_stream(pipe) as stream:
            for batch in stream:
                step = batch["step"][0].as_py()
                engine.apply({"words": (batch["id"], batch["gradient"])}, local_step=step, contributor=worker)
                turn.tell()
        failed = False
    finally:
        turn.tell(failed)  # no worker waits for one whose stream broke


def one_after_the_other() -> ps.Engine:
    """Return an engine with the fresh gradients of every step, applied on one thread, worker by worker."""
    engine = new_engine()
    for step in range(STEPS):
        for worker in range(WORKERS):
            engine.apply({"words": gradient(worker, step)}, local_step=step)
    return engine


if __name__ == "__main__":
    sys.exit(main())
