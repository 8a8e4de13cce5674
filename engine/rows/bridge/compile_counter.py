"""A counter of the programs that JAX compiled or loaded from its cache; constant in a steady state."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def num_compiles() -> int:
    """Return the number of programs compiled in this process since the first call with jax loaded, the user's too."""
    if "jax" in sys.modules:
        _begin()
    return _count


@cache
def _begin() -> None:
    import jax

    jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _count
    _count += event == _EVENT
