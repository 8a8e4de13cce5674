"""Small engines and batches for them."""

import numpy as np

import penstock as ps


def config_of(optimizer=None, tables=("t",), dim=2, rows=10, **of_table):
    """A configuration of equal tables. of_table : what else TableConfig takes"""
    configs = [ps.TableConfig(rows, dim, name=name, **of_table) for name in tables]
    return ps.EmbeddingConfig.from_tables(configs, optimizer or ps.SGD(1.0))


def engine_of(optimizer=None, tables=("t",), dim=2, rows=10, initializer=None, **options):
    """An engine of equal tables. options : of the engine"""
    return ps.Engine(config_of(optimizer, tables, dim, rows, initializer=initializer), **options)


def stored(config, in_16_bits=(), sharding="DIV"):
    """The configuration with the weights of some tables in 16 bits, and rows that are distributed so."""
    message = config.to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = 1 if sharding == "MOD" else 0
    for name in in_16_bits:
        settings = next((table for table in message.table if table.name == name), None) or message.table.add(name=name)
        settings.storage_dtype = settings.BFLOAT16
    return ps.EmbeddingConfig.from_proto(message)


def zeroed(engine, dim=2, rows=10):
    """The engine with rows of zeros, and the slots of a start."""
    for name in engine.config.table_names:
        slots = {slot: np.full((rows, dim), start, np.float32) for slot, start in engine.config.table(name).slots}
        engine.load_parameters(name, np.zeros((rows, dim)), **slots)
    return engine


def frame(ids, value=1.0, dim=2):
    """Ids and their gradients, of one value."""
    return np.array(ids), np.full((len(ids), dim), value, np.float32)


def parts_of(engine, name="t"):
    """Weights, then slots."""
    return list(engine.retrieve_parameters(name).values())


def same(parts, others):
    """Whether arrays have the same bits."""
    return [part.tobytes() for part in parts] == [part.tobytes() for part in others]


def column(engine, name="t"):
    """The first column of ten rows."""
    return engine.lookup(name, range(10))[:, 0].tolist()
