"""How many programs JAX has compiled, or taken from its cache, since this was loaded: in a steady state, none."""

from __future__ import annotations

from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def num_compiles() -> int:
    """Of this process, users' own programs included."""
    return _count


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)
