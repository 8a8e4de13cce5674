"""The 32-bit words of a table's arrays: as the bits of floats, and as halves of 16 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def floats_of(words: jax.Array) -> jax.Array:
    """Return the floats whose bits are words."""
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def bits_of(floats: jax.Array) -> jax.Array:
    """Return the bits of floats as int32."""
    return jax.lax.bitcast_convert_type(floats, jnp.int32)


def halves_of(words: jax.Array) -> jax.Array:
    """Return words, (n, 1, strip) of int32 or float32, as int16 (n, 2, strip), the low halves first."""
    words = words if words.dtype == jnp.int32 else bits_of(words)
    return (words >> np.array([[0], [16]], np.int32)).astype(jnp.int16)


def joined_halves(pairs: jax.Array) -> jax.Array:
    """Return the int32 words of halves: the inverse of ``halves_of``."""
    low, high = (pairs[:, half : half + 1].astype(jnp.int32) for half in range(2))
    return low & 0xFFFF | jax.lax.shift_left(high, 16)
