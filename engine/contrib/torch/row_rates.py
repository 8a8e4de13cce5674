"""Learning rates of rows that a ``Step`` gives: functions of the step, and schedulers of torch. It knows no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.torch.stores import TableInfo, no_table
from penstock.model.learning_rates import is_usable

_NAME = "learning_rates"


class RowRates:
    """The rates that every frame carries.

    entries : table or tag → a function of the step, a scheduler, or a scheduler and the number of a parameter group
    tables : those of the store

    tags : whose rates the entries give
    Raises UsageError, UsageTypeError.
    """

    def __init__(self, entries: Mapping[Any, Any], tables: Mapping[str, TableInfo]) -> None:
        if not isinstance(entries, Mapping):
            raise UsageTypeError(
                f"{_NAME}: expected a dict of table or tag → a function of the step or a scheduler, got "
                f"{type(entries).__name__}"
            )
        self._rates: dict[int, tuple[str, Callable[[int], Any]]] = {}  # tag → the entry's name, and its rate by step
        of_tag: dict[int, Any] = {}
        for key, entry in entries.items():
            tag, place = _tag(key, tables)
            if of_tag.setdefault(tag, entry) is not entry:
                raise UsageError(f"{_NAME}: {self._rates[tag][0]} and {place} have one tag, {tag}; give it one rate")
            self._rates[tag] = place, _rate_of(entry, place)
            for name, info in tables.items():
                if info.tag == tag and info.served_rate is not None:
                    raise UsageError(
                        f"{_NAME}: the service's --learning-rate {tag}={info.served_rate:g} takes precedence for "
                        f"table '{name}'; start it without, or omit the rate of {place} here"
                    )
        self.tags = frozenset(self._rates)

    def at(self, step: int) -> dict[int, float]:
        """Return the rate of every tag that has an entry. Raises UsageError if one is not finite."""
        rates = {}
        for tag, (place, rate_at) in self._rates.items():
            value = rate_at(step)
            try:
                rates[tag] = float(value)
            except (TypeError, ValueError, OverflowError):
                rates[tag] = float("nan")
            if not is_usable(rates[tag]):
                raise UsageError(
                    f"{_NAME}: the rate of {place} at step {step} is {value!r}; expected a finite number that fits "
                    "float32; nothing was sent"
                )
        return rates


def _tag(key: Any, tables: Mapping[str, TableInfo]) -> tuple[int, str]:
    """Return the tag of an entry, and how errors name the entry. Raises UsageError."""
    if isinstance(key, int) and not isinstance(key, bool):
        tags = sorted({info.tag for info in tables.values() if info.tag is not None})
        if key not in tags:
            has = f"tags 0 to {tags[-1]}" if tags else "no dynamic tags"
            raise UsageError(f"{_NAME}: no tag {key}; the configuration has {has}")
        return key, f"tag {key}"
    if key not in tables:
        raise no_table(_NAME, key, tables)
    tag = tables[key].tag
    if tag is None:
        raise UsageError(
            f"{_NAME}: the learning rate of table '{key}' is a constant of the configuration; make it dynamic there, "
            "with ps.DynamicLearningRate(TAG)"
        )
    return tag, f"table '{key}'"


def _rate_of(entry: Any, place: str) -> Callable[[int], Any]:
    """Return the rate of an entry as a function of the step. Raises UsageError, UsageTypeError."""
    scheduler, group = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
    is_class = isinstance(scheduler, type)  # of schedulers: it can be called, too
    last_rates = getattr(scheduler, "get_last_lr", None)
    if callable(last_rates) and not is_class:
        count = len(last_rates())
        if group is None and count > 1:
            raise UsageError(
                f"{_NAME}: the scheduler of {place} has {count} parameter groups; give (scheduler, NUMBER), from 0"
            )
        number = 0 if group is None else group
        if not isinstance(number, int) or not 0 <= number < count:
            raise UsageError(f"{_NAME}: the scheduler of {place} has groups 0 to {count - 1}, got {number!r}")
        return lambda step: last_rates()[number]
    if callable(entry) and not is_class:
        rate_at: Callable[[int], Any] = entry
        return rate_at
    raise UsageTypeError(
        f"{_NAME}: expected a function of the step or a scheduler of torch.optim for {place}, got "
        f"{type(scheduler).__name__}"
    )
