"""Small engines and batches for them."""

import numpy as np

import penstock as ps


def engine_of(optimizer=None, tables=("t",), dim=2, rows=10, **options):
    config = ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(rows, dim, name=t) for t in tables], optimizer or ps.SGD(1.0)
    )
    return ps.Engine(config, **options)


def stored(config, in_16_bits=(), sharding="DIV"):
    """The configuration with the weights of some tables in 16 bits, and rows that are distributed so."""
    message = config.to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = 1 if sharding == "MOD" else 0
    for name in in_16_bits:
        settings = next((table for table in message.table if table.name == name), None) or message.table.add(name=name)
        settings.storage_dtype = settings.BFLOAT16
    return ps.EmbeddingConfig.from_proto(message)


def zeroed(engine, dim=2, rows=10):
    for name in engine.config.table_names:
        slots = {slot: np.full((rows, dim), start, np.float32) for slot, start in engine.config.table(name).slots}
        engine.load_parameters(name, np.zeros((rows, dim)), **slots)
    return engine


def frame(ids, value=1.0, dim=2):
    return np.array(ids), np.full((len(ids), dim), value, np.float32)


def parts_of(engine, name="t"):
    """Weights, then slots."""
    return list(engine.retrieve_parameters(name).values())


def same(parts, others):
    return [part.tobytes() for part in parts] == [part.tobytes() for part in others]


def column(engine, name="t"):
    return engine.lookup(name, range(10))[:, 0].tolist()
