"""Choices: sets of settings that a plan compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from penstock.config.specs import TableSpec
from penstock.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Choice:
    """Settings of every dynamic table, in place of the configuration's.

    capacity : rows; None: the configuration's vocabulary_size
    settings : of ``Dynamic``, by name
    """

    capacity: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, spec: TableSpec) -> TableSpec:
        """Return the spec of a dynamic table with these settings. Raises UsageError if they contradict each other."""
        assert spec.dynamic is not None
        settings = dict(self.settings)
        if settings.get("expire_after", spec.dynamic.expire_after) is None and spec.dynamic.evict is None:
            settings["clock"] = "steps"  # which decides nothing then
        if settings.get("min_count") == 1:  # then nothing is counted
            settings["count"] = "rows"
            if spec.dynamic.on_full == "error":
                settings["forget_after"] = None
        try:
            dynamic = replace(spec.dynamic, **settings)
        except ConfigError as error:
            raise UsageError(f"table '{spec.name}': {error}") from None
        return replace(spec, vocabulary_size=self.capacity or spec.vocabulary_size, dynamic=dynamic)


def all_choices(capacities: Sequence[int], settings: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return every combination, capacities first; nothing given for a setting: the configuration's."""
    given = {name: values for name, values in settings.items() if values}
    each: Sequence[int | None] = capacities or (None,)
    return [
        Choice(capacity, dict(zip(given, values, strict=True)))
        for capacity in each
        for values in product(*given.values())
    ]
