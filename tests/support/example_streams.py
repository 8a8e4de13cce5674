"""Example streams of a few lookups, and the rows that they stand for."""

import numpy as np
import pyarrow as pa

import penstock as ps

USER = [[0, 2], [], [4], [1, 1, 3]]
GRADIENTS = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)


def config_of(combiner="mean", features=("user",), dims=(2,), **options):
    """Tables of six rows, and features that look up in them."""
    tables = [ps.TableConfig(6, dim, name=f"t{n}", combiner=combiner) for n, dim in enumerate(dims)]
    listed = [
        ps.FeatureConfig(tables[min(n, len(tables) - 1)], name=name, **options) for n, name in enumerate(features)
    ]
    return ps.EmbeddingConfig.from_features(listed, 4, ps.Adagrad(0.5))


def structs(ids, gradients, weights=None, kind=None):
    """One feature's column."""
    fields = {
        "ids": pa.array(ids, pa.list_(kind or pa.int64())),
        "gradient": pa.array(list(np.asarray(gradients)), pa.list_(pa.float32(), np.shape(gradients)[1])),
    }
    if weights is not None:
        fields["weights"] = pa.array(weights, pa.list_(pa.float32()))
    return pa.StructArray.from_arrays(list(fields.values()), list(fields))


def examples(step=None, **features):
    """A batch of features, each a column, and of steps."""
    batch = dict(features)
    if step is not None:
        batch["step"] = pa.array(step, pa.int64())
    return pa.record_batch(batch)


def hash_of(config, batches, **options):
    """The state hash after batches."""
    engine = ps.Engine(config)
    engine.run(batches, **options)
    return engine.state_hash()
