"""Placement: where the rows and slots of a table lie, in Python and in ``TableSettings.placement``."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.engine_config_pb2 import PlacementSettings, TableSettings
from penstock.errors import ConfigError

# The values of PlacementSettings.Where, in the order of their numbers.
_WHERE = ("device", "host")


@dataclass(frozen=True)
class Placement:
    """Where the rows and slots of a table lie. It never changes a bit of them.

    where : "device", on the devices of the engine's mesh; or "host", in the host's memory, where the host's CPUs update
        them whatever the devices are
    """

    where: str = "device"

    def __post_init__(self) -> None:
        if self.where not in _WHERE:
            raise ConfigError(f"where must be one of {', '.join(_WHERE)}, got {self.where!r}")


ON_DEVICES = Placement()


def write_placement(settings: TableSettings, placement: Placement) -> None:
    """Write a placement that is not the default."""
    if placement != ON_DEVICES:
        settings.placement.CopyFrom(PlacementSettings(where=placement.where.upper()))


def read_placement(settings: TableSettings) -> Placement:
    """Return the placement of a table. Raise ConfigError for one of a newer penstock."""
    number = settings.placement.where
    return Placement(_WHERE[number] if 0 <= number < len(_WHERE) else f"number {number}")
