"""A square root for vector units without one: exact, from products, shifts and comparisons.

A float's mantissa, shifted by an even exponent, is an integer n of 47 or 48 bits. Its root s has 24 bits and is the
nearest if ``-s < n - s*s <= s``. Newton's steps on 1/sqrt come within two of it. Both terms of ``n - s*s`` are taken
modulo 2**32, which loses nothing because their difference is small. So neither a fused product nor an approximate
division can change a bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MANTISSA, IMPLIED = 0x7FFFFF, 0x800000
INFINITY, NAN = 0x7F800000, 0x7FC00000


def root(values: jax.Array) -> jax.Array:
    """Return the correctly rounded sqrt of float32s. A subnormal counts as the zero of its sign, as in all of XLA."""
    words = jax.lax.bitcast_convert_type(values, jnp.int32)
    exponents, mantissas = jax.lax.shift_right_logical(words, 23), words & MANTISSA
    odd = 1 - (exponents & 1)  # the parity of the unbiased exponent
    near = _floats(jax.lax.shift_left(127 + odd, 23) | mantissas)  # the mantissa, in [1, 4)
    roots = (near * _inverse(near) * np.float32(1 << 23)).astype(jnp.int32)
    square = jax.lax.shift_left(mantissas | IMPLIED, 23 + odd)
    for _ in range(2):
        rest = square - roots * roots
        roots = roots + jnp.where(rest > roots, 1, 0) - jnp.where(rest <= -roots, 1, 0)
    exponent = jax.lax.shift_right_logical(exponents - odd + 127, 1)
    found = jax.lax.shift_left(exponent, 23) + (roots - IMPLIED)
    none = jnp.where(words == INFINITY, words, NAN)  # for infinity, negative numbers and NaNs
    found = jnp.where((exponents == 0) | (exponents == 256), words & ~(MANTISSA), found)
    return _floats(jnp.where((exponents < 255) | (exponents == 256), found, none))


def _inverse(near: jax.Array) -> jax.Array:
    """Return 1/sqrt to about 23 bits: the first guess halves the exponent, and each step doubles the correct bits."""
    words = jax.lax.bitcast_convert_type(near, jnp.int32)
    found = _floats(0x5F3759DF - jax.lax.shift_right_logical(words, 1))
    for _ in range(3):
        found = found * (np.float32(1.5) - np.float32(0.5) * near * found * found)
    return found


def _floats(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
