"""A counter of the programs that JAX compiled or loaded from its cache since import; constant in a steady state."""

from __future__ import annotations

from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def num_compiles() -> int:
    """Return the number of programs compiled in this process, the user's included."""
    return _count


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)
