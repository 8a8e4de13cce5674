"""Initial rows of tables: random values that depend only on (seed, table name, id).

They use only NumPy's Philox bits and IEEE add, multiply and divide (``pyx.initial_rows``), so tables start with the
same rows on every machine and mesh, and any rows can be drawn without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.array_conversion import as_numbers, is_numeric
from penstock.base.errors import ConfigError
from penstock.model.config.specs import TableSpec
from penstock.model.config.tables import Constant, FromFile, RowIdInitializer, TruncatedNormal, Uniform
from penstock.model.frames import Float32, Int64
from penstock.pyx.initial_rows import draw, philox_key
from penstock.rows.initial_vectors import Vectors, described, open_vectors, vectors_of


class InitialRows(NamedTuple):
    """The rows that ids have before anything is written to them, and keys without a row.

    kind : "zero"; "constant": ``first``; "row_id": the key plus ``first``; "normal" and "uniform": drawn with
        ``first``, ``second`` and the generator's ``key``, as ``pyx.initial_rows`` does; "vectors": those of a file,
        which ``key`` describes
    """

    kind: str = "zero"
    first: float = 0.0
    second: float = 0.0
    key: str = ""

    def fill(self, keys: npt.NDArray[Any], out: Float32) -> None:
        """Write the rows of keys, of their type, to ``out``: float32 (n, dim)."""
        if self.kind in ("zero", "constant"):
            out.fill(self.first)
        elif self.kind == "vectors":
            if len(keys):
                self.vectors(keys.dtype.name, out.shape[1]).fill(keys.view(np.int64), out)
        elif self.kind == "row_id":
            out[:] = (keys.astype(np.float64) + self.first)[:, None]
        elif len(keys):
            draw(keys.view(np.int64), bytes.fromhex(self.key), self.kind == "normal", self.first, self.second, out)

    def vectors(self, id_type: str, dim: int) -> Vectors:
        """Return the vectors of a dynamic table. Raises StateError and InputError for their file."""
        return vectors_of(self.key, id_type, dim)


def start_of(spec: TableSpec, seed: int) -> Callable[[Int64], Float32]:
    """Return a static table's initializer: ids → their rows, float32 (n, dim).

    Raises ConfigError if it gives the wrong shape.
    """
    start, shape = spec.initializer, (spec.vocabulary_size, spec.dim)
    if isinstance(start, TruncatedNormal | Uniform | Constant):
        initial = initial_rows(spec, seed)

        def drawn(ids: Int64) -> Float32:
            out = np.empty((len(ids), spec.dim), np.float32)
            initial.fill(ids, out)
            return out

        return drawn
    if isinstance(start, FromFile):
        vectors = open_vectors(spec)

        def found(ids: Int64) -> Float32:
            out = np.empty((len(ids), spec.dim), np.float32)
            vectors.fill(ids, out)
            return out

        return found
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
    if isinstance(start, FromFile):
        return InitialRows("vectors", key=described(spec))
    key = philox_key(b"start", seed, spec.drawn_as).hex()
    if isinstance(start, TruncatedNormal):
        return InitialRows("normal", start.stddev, start.mean, key)
    assert isinstance(start, Uniform)  # a configuration of a dynamic table with another one is refused
    return InitialRows("uniform", start.maximum - start.minimum, start.minimum, key)
