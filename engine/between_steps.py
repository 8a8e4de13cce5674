"""What surrounds the Engine's methods: what holds a step back while tables are looked at, what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from penstock.config.embedding import EmbeddingConfig
from penstock.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from penstock.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")
REDUCTIONS = ("mean", "sum")


def between_steps(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Between two steps: a step replaces the arrays on the devices, and other threads may be pushing.

    Not after a step that failed half way: such tables are of no step.
    """

    @wraps(method)
    def held(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.gate.still():
            self._check_whole()
            return method(self, *args, **kwargs)

    return held


def check_gradients(gradients: Any) -> None:
    """Raise UsageError for what is no mapping of pairs."""
    wanted = "gradients: expected a mapping table → (ids, gradients)"
    if not isinstance(gradients, dict | Mapping):  # a dict is found out at once, a Mapping is asked for
        raise UsageError(f"{wanted}, got {type(gradients).__name__}")
    for table, pair in gradients.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"{len(pair)} values" if isinstance(pair, tuple | list) else type(pair).__name__
            raise UsageError(f"{wanted}, got {got} for '{table}'")


def checked_reduction(config: Any, mesh: Any, reduction: str | None) -> str:
    """How an engine reduces: as asked, as the configuration says, or the mean. Raises for what no engine is made of."""
    if not isinstance(config, EmbeddingConfig):
        raise ConfigError(f"config: expected an EmbeddingConfig, got {type(config).__name__}")
    if mesh is not None and not hasattr(mesh, "devices"):
        raise UsageError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    reduction = reduction or config.gate_reduction or "mean"
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction: expected 'mean' or 'sum', got '{reduction}'")
    return reduction
