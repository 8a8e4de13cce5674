"""The learning rates of one step, resolved by precedence.

Precedence, tag by tag: the call (``learning_rates=``, ``--learning-rate``), then the frame's column, then the schedule,
called once per step with the global step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from penstock.base.errors import ConfigError, UsageError

Rates = Mapping[int, float] | Sequence[float] | None


# Rates are float32 on the device: a larger one becomes infinite there and destroys the tables.
MAX_FLOAT32 = 3.4028234663852886e38


def is_usable(rate: float) -> bool:
    """Return whether a rate is finite as a float32."""
    return abs(rate) <= MAX_FLOAT32


def check_given(values: Rates, num_tags: int) -> dict[int, float]:
    """Return the rates of a call by tag. values : a mapping for some tags, or a sequence for all. Raises UsageError."""
    if values is None:
        return {}
    if isinstance(values, Mapping):
        by_tag = dict(values)
    else:
        try:
            by_tag = dict(enumerate(values))
        except TypeError:
            raise UsageError(f"learning_rates: expected a sequence or a mapping by tag, got {values!r}") from None
        if len(by_tag) != num_tags:
            raise UsageError(f"learning_rates: expected {num_tags} values, one per dynamic tag, got {len(by_tag)}")
    rates = {}
    for tag, rate in by_tag.items():
        if not isinstance(tag, int) or not 0 <= tag < num_tags:
            has = f"tags 0 to {num_tags - 1}" if num_tags else "no dynamic tags"
            raise UsageError(f"learning rate for tag {tag!r}: the configuration has {has}")
        try:
            rates[tag] = float(rate)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"learning rate for tag {tag}: expected a number, got {rate!r}") from None
        if not is_usable(rates[tag]):
            raise UsageError(f"learning rate for tag {tag}: expected a finite number that fits float32, got {rate}")
    return rates


class LearningRates:
    """Resolves the value of every tag at an opening. given : the rates of the call by tag, which take precedence"""

    def __init__(self, num_tags: int, rates: Rates, schedules: Mapping[int, Callable[..., Any]]) -> None:
        self.num_tags = num_tags
        self.given = check_given(rates, num_tags)
        self._schedules = schedules

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """The tags whose only source of values is the frames."""
        return tuple(t for t in range(self.num_tags) if t not in self.given and t not in self._schedules)

    def complete(self) -> LearningRates:
        """Return these rates. Raises ConfigError if a tag is missing."""
        if self.missing:
            raise ConfigError(
                "the configuration has dynamic learning rates: give learning_rates=, one value per tag "
                f"(0 to {self.num_tags - 1})"
            )
        return self

    @cached_property
    def constant(self) -> tuple[float, ...] | None:
        """One value per tag, if neither frames nor steps change them; else None."""
        tags = range(self.num_tags)
        return tuple(self.given[tag] for tag in tags) if all(tag in self.given for tag in tags) else None

    def expected(self, global_step: int, last_rates: Sequence[float] | None) -> tuple[float, ...]:
        """Return one value per tag before a frame is there: where only frames have it, the last one, or NaN.

        last_rates : of the last step; None: none is known. Raises ConfigError.
        """
        last = last_rates or (math.nan,) * self.num_tags
        tags = range(self.num_tags)
        return tuple(last[tag] if tag in self.missing else self._value(tag, global_step, None) for tag in tags)

    def at(self, global_step: int, frame_rates: Sequence[float] | None) -> tuple[float, ...]:
        """Return one value per tag. frame_rates : of the frame that opens the gate. Raises ConfigError, UsageError."""
        if frame_rates is not None and len(frame_rates) != self.num_tags:
            raise UsageError(f"learning_rates: expected {self.num_tags} values, got {len(frame_rates)}")
        if not self.num_tags:
            return ()
        return tuple(self._value(tag, global_step, frame_rates) for tag in range(self.num_tags))

    def _value(self, tag: int, global_step: int, frame_rates: Sequence[float] | None) -> float:
        if tag in self.given:
            return self.given[tag]
        if frame_rates is not None:
            return frame_rates[tag]
        if tag not in self._schedules:
            raise ConfigError(
                f"dynamic learning-rate tag {tag} has no value: give learning_rates= (--learning-rate {tag}=VALUE), "
                "a 'learning_rates' column, or a schedule"
            )
        schedule = self._schedules[tag]
        value = schedule(global_step) if _takes_step(schedule) else schedule()
        try:
            rate = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"the schedule of tag {tag} gave {value!r} at step {global_step}; expected a number"
            ) from None
        if not is_usable(rate):
            raise ConfigError(
                f"the schedule of tag {tag} gave {rate} at step {global_step}; expected a finite "
                "number that fits float32"
            )
        return rate


def _takes_step(schedule: Callable[..., Any]) -> bool:
    """Return whether a schedule needs the step, as optax's do. TensorFlow's callables take no argument."""
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return not _binds(signature) and _binds(signature, 0)


def _binds(signature: inspect.Signature, *args: int) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True
