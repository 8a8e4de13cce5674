"""The square root where a vector unit has none: exact, from products, shifts and comparisons.

A float's mantissa, shifted by an even exponent, is an integer n of 47 or 48 bits; its root s has 24, and is the nearest
where ``-s < n - s*s <= s``. Newton's steps on 1/sqrt come within two of it. Both terms of ``n - s*s`` are taken modulo
2**32, which loses nothing: their difference is small. So neither a fused product nor an approximate division can
change a bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MANTISSA, IMPLIED = 0x7FFFFF, 0x800000
INFINITY, NAN = 0x7F800000, 0x7FC00000


def root(values: jax.Array) -> jax.Array:
    """sqrt of float32s, correctly rounded. A subnormal counts as the zero of its sign, as everywhere in XLA."""
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    exponents, mantissas = jax.lax.shift_right_logical(words, 23), words & MANTISSA
    odd = 1 - (exponents & 1)  # of the exponent that is meant, 127 below
    near = _floats(jax.lax.shift_left(127 + odd, 23) | mantissas)  # the mantissa, of 1 up to 4
    roots = (near * _inverse(near) * np.float32(1 << 23)).astype(jnp.int32)
    square = jax.lax.shift_left(mantissas | IMPLIED, 23 + odd)
    for _ in range(2):
        rest = square - roots * roots
        roots = roots + jnp.where(rest > roots, 1, 0) - jnp.where(rest <= -roots, 1, 0)
    exponent = jax.lax.shift_right_logical(exponents - odd + 127, 1)
    found = jax.lax.shift_left(exponent, 23) + (roots - IMPLIED)
    none = jnp.where(words == INFINITY, words, NAN)  # of infinity, of what is below 0, and of what is no number
    found = jnp.where((exponents == 0) | (exponents == 256), words & ~(MANTISSA), found)
    return _floats(jnp.where((exponents < 255) | (exponents == 256), found, none))


def _inverse(near: jax.Array) -> jax.Array:
    """1/sqrt, to about 23 bits: the first guess is the halved exponent's, and each step doubles the bits."""
    words = jax.lax.bitcast_convert_type(near, jnp.int32)
    found = _floats(0x5F3759DF - jax.lax.shift_right_logical(words, 1))
    for _ in range(3):
        found = found * (np.float32(1.5) - np.float32(0.5) * near * found * found)
    return found


def _floats(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
