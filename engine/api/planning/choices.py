"""Choices: sets of settings that a plan compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from penstock.base.errors import ConfigError, UsageError
from penstock.model.config.dynamic import Dynamic
from penstock.model.config.specs import TableSpec


@dataclass(frozen=True)
class Choice:
    """Settings of every dynamic and of every cached table, in place of the configuration's.

    capacity : rows of dynamic tables; None: the configuration's vocabulary_size
    settings : of ``Dynamic``, by name; placement : of ``Placement``, of cached tables
    """

    capacity: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)

    def of(self, spec: TableSpec) -> TableSpec:
        """Return the spec of a table with these settings. Raises UsageError if they contradict each other."""
        if spec.dynamic is not None:
            spec = self._of_dynamic(spec, spec.dynamic)
        if spec.placement.where == "cached":
            spec = replace(spec, placement=replace(spec.placement, **self.placement))
        return spec

    def _of_dynamic(self, spec: TableSpec, dynamic: Dynamic) -> TableSpec:
        settings = dict(self.settings)
        if settings.get("expire_after", dynamic.expire_after) is None and dynamic.evict is None:
            settings["clock"] = "steps"  # which decides nothing then
        if settings.get("min_count") == 1:  # then nothing is counted
            settings["count"] = "rows"
            if dynamic.on_full == "error":
                settings["forget_after"] = None
        try:
            dynamic = replace(dynamic, **settings)
        except ConfigError as error:
            raise UsageError(f"table '{spec.name}': {error}") from None
        return replace(spec, vocabulary_size=self.capacity or spec.vocabulary_size, dynamic=dynamic)


def all_choices(
    capacities: Sequence[int], settings: Mapping[str, Sequence[Any]], placements: Mapping[str, Sequence[Any]]
) -> list[Choice]:
    """Return every combination, capacities first; nothing given for a setting: the configuration's."""
    axes = {name: values for name, values in settings.items() if values}
    placed = {name: values for name, values in placements.items() if values}
    each: Sequence[int | None] = capacities or (None,)
    return [
        Choice(capacity, dict(zip(axes, values, strict=True)), dict(zip(placed, places, strict=True)))
        for capacity in each
        for values in product(*axes.values())
        for places in product(*placed.values())
    ]
