"""Which norms gradients may have, in Python and in ``EngineConfig.clip`` and ``limit``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import ClipSettings, EngineConfig, LimitSettings
from penstock.model.updates.rule import float32

ACTIONS = ("clip", "quarantine")  # by the numbers of LimitSettings.Action


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


@dataclass(frozen=True)
class Limit:
    """What becomes of a frame whose norm exceeds what is usual for its contributor, from its 101st frame on.

    Parameters
    ----------
    contributor_norm : float
        At least 1: the largest norm, in medians (the 50th smallest) of the norms of the last 100 frames of the
        contributor that were applied, without those of norm 0. A norm is that of all gradient rows of the frame. Beyond
        1,000 contributors, further ones count as one.
    action : {"clip", "quarantine"}
        "clip": the frame is scaled down to that norm. "quarantine": it is left out, also if a gradient is not finite;
        its rows count as dropped for the reason ``norm_limit``. In rounds it counts as a frame without rows.

    Raises
    ------
    ConfigError
        If an argument is out of range.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 1, ps.Constant(0.0), ps.SGD(1.0), name="user")
    >>> limit = ps.Limit(contributor_norm=10.0, action="quarantine")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], limit=limit))
    >>> for gradient in [1.0] * 100 + [1e6]:
    ...     applied = engine.apply({"user": ([5], [[-gradient]])}, contributor="worker")
    >>> engine.lookup("user", [5]), engine.global_step
    (array([[100.]], dtype=float32), 100)
    """

    contributor_norm: float
    action: str = "clip"

    def __post_init__(self) -> None:
        for name, problem in problems({"contributor_norm": self.contributor_norm}, least=1):
            raise ConfigError(f"limit: {name} is {problem}; it must be a finite number of at least 1")
        if self.action not in ACTIONS:
            raise ConfigError(f"limit: action must be one of {', '.join(ACTIONS)}, got {self.action!r:.100}")
        object.__setattr__(self, "contributor_norm", float32(self.contributor_norm))


def problems(given: dict[str, Any], least: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the name of each norm that is not finite in float32, not above 0 or below ``least``, and its value."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            yield name, f"{value!r:.100}"
        elif not (0 < float32(float(value)) < math.inf and float(value) >= least):
            yield name, f"{float(value):g}"


def norms_of(message: ClipSettings | LimitSettings) -> dict[str, Any]:
    """Return the norms that a message sets."""
    names = [field.name for field in message.DESCRIPTOR.fields if field.name.endswith("norm")]
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def clip_of(message: EngineConfig) -> Clip | None:
    """Return the clipping of a configuration, None if it has none. Raises ConfigError."""
    return Clip(**norms_of(message.clip)) if message.HasField("clip") else None


def limit_of(message: EngineConfig) -> Limit | None:
    """Return the limit of a configuration, None if it has none. Raises ConfigError."""
    return Limit(**norms_of(message.limit), action=ACTIONS[message.limit.action]) if message.HasField("limit") else None


def write_norms(message: EngineConfig, clip: Clip | None, limit: Limit | None) -> None:
    """Write those that are given. Raises ConfigError for anything else."""
    if clip is not None:
        if not isinstance(clip, Clip):
            raise ConfigError(f"clip must be a Clip, got {clip!r:.100}")
        message.clip.CopyFrom(ClipSettings(global_norm=clip.global_norm, row_norm=clip.row_norm))
    if limit is not None:
        if not isinstance(limit, Limit):
            raise ConfigError(f"limit must be a Limit, got {limit!r:.100}")
        action = limit.action.upper()
        message.limit.CopyFrom(LimitSettings(contributor_norm=limit.contributor_norm, action=action))


def check_no_norms(clip: Clip | None, limit: Limit | None, subject: str) -> None:
    """Raise ConfigError for a clip or limit. subject : what has only a part of the gradients of a step"""
    for name, given in (("clip", clip), ("limit", limit)):
        if given is not None:
            raise ConfigError(f"{name}: {subject} knows no norms of gradients; remove it, or use one engine")
