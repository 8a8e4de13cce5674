"""Detection of JAX tracing, during which a Python function runs once and not once per call."""

from __future__ import annotations

import sys
from typing import Any

_not_traced: Any = None  # the state of a former call outside of traces


def is_staging() -> bool:
    """Return whether operations become part of a program: inside jit, scan and shard_map, not inside grad or vmap."""
    global _not_traced
    if "jax" not in sys.modules:
        return False
    import jax
    from jax.extend.core import get_opaque_trace_state

    # This check takes half a microsecond outside traces; creating an array takes a hundred times as long.
    state = get_opaque_trace_state(convention="flax")
    if state == _not_traced:
        return False
    if isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        return True
    _not_traced = state
    return False
