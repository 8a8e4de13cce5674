"""The promotions of arrays that update rules are written for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_promotions() -> Iterator[None]:
    """Trace with JAX's ordinary promotions of ranks and types, whatever the caller has set for other programs."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
