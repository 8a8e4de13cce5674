"""Initial rows of tables: random values that depend only on (seed, table name, id).

They use only NumPy's Philox bits and IEEE add, multiply and divide, so tables start with the same rows
on every machine and mesh, and any range of rows can be drawn without the rows before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.specs import TableSpec
from penstock.config.tables import Constant, RowIdInitializer, TruncatedNormal, Uniform
from penstock.errors import ConfigError
from penstock.frames import Float32
from penstock.pyx.initial_rows import draw, philox_key

Run = Callable[[list[Callable[[], bool]]], Any]

# TensorFlow's truncated normal redraws values beyond two standard deviations. This one inverts the
# distribution function: x = q*P(q²)/Q(q²) for |q| <= Φ(2) - ½ is within 4e-9 of the normal quantile
# of ½ + q (least-squares fit, checked on 2e6 points), far below one float32 step at 2. It is a
# rational function because log and exp differ between C libraries in their last bit.
_HALF_WIDTH = 0.4772498680518208
_P = (
    2.506628277481258,
    -30.74622382801368,
    139.1492294923544,
    -278.5147114114572,
    224.03642817156643,
    -40.52895479889411,
)
_Q = (
    1.0,
    -13.313165719867957,
    67.1510818369637,
    -157.02215052762983,
    163.6011732862739,
    -55.4425703360281,
)
_WORDS_PER_BLOCK = 4  # of 64 bits, per Philox counter value
_FLOATS_AT_ONCE = 1 << 14  # intermediate arrays fit in the L2 cache


def start_of(spec: TableSpec, seed: int) -> Callable[[int, int], Float32]:
    """Return a table's initializer: (first, count) → rows. Raises ConfigError if it gives the wrong shape."""
    start = spec.initializer
    name, dim = spec.drawn_as, spec.dim
    if isinstance(start, TruncatedNormal):
        mean, stddev = start.mean, start.stddev
        return lambda first, count: truncated_normal(seed, name, first, count, dim, mean, stddev)
    if isinstance(start, Uniform):
        low, high = start.minimum, start.maximum
        return lambda first, count: uniform(seed, name, first, count, dim, low, high)
    if isinstance(start, Constant):
        value = start.value
        return lambda first, count: np.full((count, dim), value, np.float32)
    rows = np.array(start((spec.vocabulary_size, dim), np.float32), np.float32, order="C")
    if rows.shape != (spec.vocabulary_size, dim):
        raise ConfigError(f"table '{spec.name}': its initializer gave shape {rows.shape}")
    return lambda first, count: rows[first : first + count]


def truncated_normal(
    seed: int, table: str, first: int, count: int, dim: int, mean: float = 0.0, stddev: float | None = None
) -> Float32:
    """Return rows ``first`` to ``first + count`` of a table initialized with a truncated normal.

    stddev : standard deviation of the normal before truncation, as in ``tf.random.truncated_normal``;
        None: TensorFlow's default for embedding tables, 1/sqrt(dim)
    Returns float32, shape (count, dim).
    """
    scale = 1.0 / math.sqrt(dim) if stddev is None else stddev
    out = np.empty((count, dim), np.float32)
    at_once = max(1, _FLOATS_AT_ONCE // dim)
    for start in range(0, count, at_once):
        rows = min(at_once, count - start)
        out[start : start + rows] = _quantile(uniform_bits(seed, table, first + start, rows, dim)) * scale + mean
    return out


def uniform(seed: int, table: str, first: int, count: int, dim: int, low: float, high: float) -> Float32:
    """Return rows drawn uniformly from [low, high), float32 of shape (count, dim)."""
    return (low + (high - low) * uniform_bits(seed, table, first, count, dim)).astype(np.float32)


def uniform_bits(seed: int, table: str, first: int, count: int, dim: int) -> npt.NDArray[np.float64]:
    """Return 53 random bits per element as float64 in (0, 1), shape (count, dim).

    Each element takes one word of its row's Philox blocks.
    """
    blocks = -(-dim // _WORDS_PER_BLOCK)
    bits = np.random.Philox(counter=first * blocks, key=int.from_bytes(start_key(seed, table), "little"))
    words = bits.random_raw(count * blocks * _WORDS_PER_BLOCK).reshape(count, -1)[:, :dim]
    drawn: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64)
    drawn *= 2.0**-53
    drawn += 2.0**-54
    return drawn


def scattered_rows(
    start: object, seed: int, table: str, keys: npt.NDArray[Any], out: Float32, run: Run | None = None
) -> None:
    """Write the initial rows of any keys, int64 or uint64, to ``out``, float32 (len(keys), dim).

    Drawn rows are those of id k modulo 2**64.
    start : an ``Initializer`` value; run : runs tasks on several threads; None: the caller's thread alone
    """
    if isinstance(start, Constant):
        out.fill(start.value)
        return
    if isinstance(start, RowIdInitializer):
        out[:] = (keys.astype(np.float64) + start.offset)[:, None]  # beyond int64, too; exact below 2**53
        return
    if normal := isinstance(start, TruncatedNormal):
        first, second = start.stddev, start.mean
    else:
        assert isinstance(start, Uniform)  # a configuration with another one is refused
        first, second = start.maximum - start.minimum, start.minimum
    key, size, drawn = start_key(seed, table), max(1, _FLOATS_AT_ONCE // out.shape[1]), keys.view(np.int64)

    def part(span: slice) -> bool:
        draw(drawn[span], key, normal, first, second, out[span])
        return True

    tasks: list[Callable[[], bool]] = [partial(part, slice(n, n + size)) for n in range(0, len(keys), size)]
    if run is None or len(tasks) == 1:
        for task in tasks:
            task()
    else:
        run(tasks)


def start_key(seed: int, table: str) -> bytes:
    """Return the key of Philox for the initial rows of a table: 16 bytes, little-endian."""
    return philox_key(b"start", seed, table)


def _quantile(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    q = (u - 0.5) * (2 * _HALF_WIDTH)
    t = q * q
    quantile: npt.NDArray[np.float64] = q * (_polynomial(_P, t) / _polynomial(_Q, t))
    return quantile


def _polynomial(coefficients: tuple[float, ...], t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Evaluate in place by Horner's rule; np.polyval gives the same bits and takes 1.4 times as long."""
    value = np.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value *= t
        value += coefficient
    return value
