"""What the tests of deltas share: the plain reader of examples/, and the tables that it starts from."""

import numpy as np
from checkpoints import DIM
from scripts import loaded

ALL_COLUMNS = {"slots": True, "numbered": True}
example = loaded("examples/apply_deltas.py")


def tables_of(engine):
    """Weights and slots as the plain reader keeps them."""
    read = {name: engine.retrieve_parameters(name) for name in engine.config.table_names}
    return {name: {"row": columns.pop("parameters"), **columns} for name, columns in read.items()}


def equal(left, right):
    """Whether tables have the same rows and slots, bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].keys() == right[name].keys()
        and all(left[name][column].tobytes() == right[name][column].tobytes() for column in left[name])
        for name in left
    )


def follower_of(engine):
    """A plain reader that has the tables as they are now."""
    return example.Follower(tables_of(engine), engine.global_step)


def follow(follower, batches):
    """The follower after it took the batches."""
    for batch in batches:
        follower.take(batch)
    follower.end()
    return follower


def numbers(batches):
    """(step, parent) of every delta, one entry per batch."""
    return [(batch["step"][0].as_py(), batch["parent"][0].as_py()) for batch in batches]


def bytes_of(batches):
    """Every batch as bytes."""
    return [batch.serialize().to_pybytes() for batch in batches]


def step(engine, ids, value=1.0):
    """Apply one frame for the table ``user``."""
    return engine.apply({"user": (np.array(ids), np.full((len(ids), DIM), value, np.float32))})
