"""What the tests of checkpoints share: a small log with everything in it, and runs over it."""

import json

import numpy as np
import pyarrow as pa

import penstock as ps
import penstock.updates as o

ROWS, DIM = 1500, 4  # more rows than shards, no multiple of any number of devices


def config_of(rows=ROWS, optimizer=None, accumulate=True, more=()):
    """Two tables, of other optimizers and dims. more : tables"""
    tables = [
        ps.TableConfig(rows, DIM, name="user", optimizer=optimizer or o.Adagrad(0.1)),
        ps.TableConfig(rows, 2, name="item", optimizer=o.SGD(0.5, use_gradient_accumulation=accumulate)),
        *more,
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def batch(step, worker=0, rows=40, seed=0):
    """One frame for two tables, ids repeated, the same whenever it is asked for."""
    rng = np.random.default_rng([seed, step, worker])
    names = ["user" if n % 3 else "item" for n in range(rows)]
    values = [rng.standard_normal(DIM if name == "user" else 2).astype(np.float32) for name in names]
    return pa.RecordBatch.from_pydict(
        {
            "table": names,
            "step": pa.array([step] * rows, pa.int64()),
            "contributor": [f"w{worker}"] * rows,
            "id": pa.array(rng.zipf(1.3, rows) % ROWS, pa.int64()),
            "gradient": pa.array([v.tolist() for v in values], pa.list_(pa.float32())),
        }
    )


def log_of(steps, workers=3, seed=0):
    """Frames of several workers, step by step."""
    return [batch(step, worker, seed=seed) for step in steps for worker in range(workers)]


LOG = log_of(range(12))


def engine_of(config=None, mesh=None, num_required=3, **arguments):
    """An engine of these tables, whose gate takes three frames."""
    return ps.Engine(config or config_of(), mesh, num_required=num_required, **arguments)


def commits(folder):
    """The names of the files of all commits."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".commit", ".base", ".delta"))


def unbroken(batches=LOG, config=None, flush=True, **arguments):
    """The state hash of a run that nothing interrupts."""
    engine = engine_of(config, **arguments)
    engine.run(iter(batches), flush=flush)
    return engine.state_hash()


def everything(engine):
    """Bits of all tables and slots, and what the gate holds."""
    parts = {name: engine.retrieve_parameters(name) for name in engine.config.table_names}
    tables = {name: {key: rows.tobytes() for key, rows in part.items()} for name, part in parts.items()}
    return tables, engine.global_step, json.dumps(engine.gate.get_state())
