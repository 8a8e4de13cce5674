"""Initial rows of tables: random values that depend only on (seed, table name, id).

They use only NumPy's Philox bits and IEEE add, multiply and divide (``pyx.initial_rows``), so tables start with the
same rows on every machine and mesh, and any rows can be drawn without the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.base.array_conversion import as_numbers, is_numeric
from penstock.base.errors import ConfigError
from penstock.model.config.specs import TableSpec
from penstock.model.config.tables import Constant, RowIdInitializer, TruncatedNormal, Uniform
from penstock.model.frames import Float32, Int64
from penstock.pyx.initial_rows import philox_key
from penstock.rows.initial_rows import InitialRows


def start_of(spec: TableSpec, seed: int) -> Callable[[Int64], Float32]:
    """Return a static table's initializer: ids → their rows, float32 (n, dim).

    Raises ConfigError if it gives the wrong shape.
    """
    start, shape = spec.initializer, (spec.vocabulary_size, spec.dim)
    if isinstance(start, TruncatedNormal | Uniform | Constant):
        initial = initial_rows(spec, seed)

        def draw(ids: Int64) -> Float32:
            out = np.empty((len(ids), spec.dim), np.float32)
            initial.fill(ids, out)
            return out

        return draw
    values = start(shape, np.float32)
    array = as_numbers(values, f"table '{spec.name}': its initializer", ConfigError)
    if not is_numeric(array):
        raise ConfigError(f"table '{spec.name}': its initializer: expected floats, got {array.dtype}")
    rows = np.array(array, np.float32, order="C")
    if rows.shape != shape:
        raise ConfigError(f"table '{spec.name}': its initializer gave shape {rows.shape}")
    return lambda ids: rows[ids]


def initial_rows(spec: TableSpec, seed: int) -> InitialRows:
    """Return the initial rows of a table without a callable initializer. Drawn ones are those of id k modulo 2**64."""
    start = spec.initializer
    if isinstance(start, Constant):
        return InitialRows("constant", start.value)
    if isinstance(start, RowIdInitializer):
        return InitialRows("row_id", start.offset)
    key = philox_key(b"start", seed, spec.drawn_as).hex()
    if isinstance(start, TruncatedNormal):
        return InitialRows("normal", start.stddev, start.mean, key)
    assert isinstance(start, Uniform)  # a configuration of a dynamic table with another one is refused
    return InitialRows("uniform", start.maximum - start.minimum, start.minimum, key)
