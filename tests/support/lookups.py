"""A feature of four samples, engines that look it up, and what TensorFlow's tensors show of themselves."""

import numpy as np

import penstock as ps

RAGGED = [[0, 2], [], [4], [1, 1, 3]]


def config_of(combiner="mean", rows=6, dim=2, batch=4, optimizer=None, table=None, **feature):
    """One table ``t``, and one feature ``f`` that looks up in it. table : what else TableConfig takes"""
    config = ps.TableConfig(rows, dim, name="t", combiner=combiner, **(table or {}))
    return ps.EmbeddingConfig.from_features(
        [ps.FeatureConfig(config, name="f", **feature)], batch, optimizer or ps.SGD(1.0)
    )


def engine_of(rows=6, dim=2, **options):
    """An engine whose rows are 0, 1, 2, …"""
    engine = ps.Engine(config_of(rows=rows, dim=dim, **options))
    engine.load_parameters("t", np.arange(rows * dim, dtype=np.float32).reshape(rows, dim))
    return engine
