"""Clipping: which norms gradients are scaled down to, in Python and in ``EngineConfig.clip``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import ClipSettings, EngineConfig
from penstock.model.updates.rule import float32


@dataclass(frozen=True)
class Clip:
    """Norms that the summed gradients of a step are scaled down to, before the optimizer.

    Parameters
    ----------
    global_norm : float or None
        Of all rows of the step, of all tables together, as for ``torch.nn.utils.clip_grad_norm_``. None: any.
    row_norm : float or None
        Of each row; before ``global_norm``. None: any.

    Raises
    ------
    ConfigError
        If neither is given, or one is not a finite number above 0.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(0.0), ps.SGD(1.0), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], clip=ps.Clip(global_norm=1.0)))
    >>> engine.apply({"user": ([5], [[-30.0, -40.0]])})
    True
    >>> engine.lookup("user", [5]).round(3)
    array([[0.6, 0.8]], dtype=float32)
    """

    global_norm: float | None = None
    row_norm: float | None = None

    def __post_init__(self) -> None:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        if not given:
            raise ConfigError("clip has neither global_norm nor row_norm; give a number above 0")
        for name, problem in problems(given):
            raise ConfigError(f"clip: {name} is {problem}; it must be a finite number above 0")
        for name, value in given.items():
            object.__setattr__(self, name, float32(value))


def problems(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each norm that is no finite number above 0 in float32, and its value as text."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            yield name, f"{value!r:.100}"
        elif not 0 < float32(float(value)) < math.inf:
            yield name, f"{float(value):g}"


def norms_of(message: ClipSettings) -> dict[str, Any]:
    """Return the norms that a message sets."""
    return {field.name: getattr(message, field.name) for field, _ in message.ListFields()}


def clip_of(message: EngineConfig) -> Clip | None:
    """Return the clipping of a configuration, None if it has none. Raises ConfigError."""
    return Clip(**norms_of(message.clip)) if message.HasField("clip") else None


def write_clip(message: EngineConfig, clip: Clip | None) -> None:
    """Write a clipping, if there is one. Raises ConfigError for anything else."""
    if clip is None:
        return
    if not isinstance(clip, Clip):
        raise ConfigError(f"clip must be a Clip, got {clip!r:.100}")
    message.clip.CopyFrom(ClipSettings(global_norm=clip.global_norm, row_norm=clip.row_norm))


def check_unclipped(clip: Clip | None, subject: str) -> None:
    """Raise ConfigError for a clipping. subject : what has only a part of the gradients of a step"""
    if clip is not None:
        raise ConfigError(f"clip: {subject} does not clip gradients; remove it, or use one engine")
