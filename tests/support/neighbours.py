"""Gradients for two tables that other libraries hold and write, and the state that they lead to."""

import numpy as np
import pyarrow as pa

import penstock as ps

DIM, ROWS = 4, 200


def config():
    """Two tables."""
    tables = [ps.TableConfig(50, DIM, name="user"), ps.TableConfig(50, DIM, name="item")]
    return ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(0.1))


def log_of_two_tables():
    """Rows of five steps, as pyarrow has them."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal(ROWS * DIM).astype(np.float32)
    names = pa.DictionaryArray.from_arrays(pa.array(np.arange(ROWS, dtype=np.int32) % 2), ["user", "item"])
    columns = {
        "step": pa.array(np.arange(ROWS) // 40),
        "table": names,
        "id": pa.array(rng.integers(0, 50, ROWS)),
        "gradient": pa.FixedSizeListArray.from_arrays(pa.array(values), DIM),
    }
    return pa.table(columns)


def state_of(source, **more):
    """The state after every row of a source was applied, in five frames."""
    engine = ps.Engine(config())
    report = engine.run(source, **more)
    assert (report.rows, report.frames) == (ROWS, 5)
    return engine.state_hash()
