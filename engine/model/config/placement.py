"""Placement: where the rows and slots of a table lie, in Python and in ``TableSettings.placement``."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import PlacementSettings, TableSettings

# The values of PlacementSettings.Where, in the order of their numbers.
_WHERE = ("device", "host", "cached")
# The fields of the placement CACHED, with their least value and the largest that fits the proto.
MOST_BYTES = 2**63 - 1
_OF_CACHED = {"device_bytes": (1, MOST_BYTES), "look_ahead": (0, 2**31 - 1)}
LOOK_AHEAD = 4  # openings


@dataclass(frozen=True)
class Placement:
    """Where the rows and slots of a table lie. It never changes a bit of them.

    Parameters
    ----------
    where : {"device", "host", "cached"}
        "device": on the devices of the engine's mesh. "host": in the host's memory, where the host's CPUs update them
        whatever the devices are. "cached": in the host's memory, and while they are updated on the devices.
    device_bytes : int or None
        Of "cached": bytes of rows, with their slots, that are on the devices at a time.
    look_ahead : int or None
        Of "cached": openings of the gate that a run reads ahead, to keep rows that are needed soon; None: 4.

    Raises
    ------
    ConfigError
        If ``where`` is unknown, or an argument is missing, out of range or of another placement.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(1000, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", placement=ps.Placement("host"))
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[1.0, 2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9, 0.8]], dtype=float32)
    """

    where: str = "device"
    device_bytes: int | None = None
    look_ahead: int | None = None

    def __post_init__(self) -> None:
        if self.where not in _WHERE:
            raise ConfigError(f"where must be one of {', '.join(_WHERE)}, got {self.where!r}")
        if self.where == "cached" and self.look_ahead is None:
            object.__setattr__(self, "look_ahead", LOOK_AHEAD)
        for name, (least, most) in _OF_CACHED.items():
            value = getattr(self, name)
            if self.where != "cached":
                if value is not None:
                    raise ConfigError(f"{name} is of the placement cached, and where is {self.where}; remove it")
            elif isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
                raise ConfigError(f"{name} of a cached table must be an int from {least} to {most}, got {value!r}")
            else:
                object.__setattr__(self, name, int(value))


ON_DEVICES = Placement()


def write_placement(settings: TableSettings, placement: Placement) -> None:
    """Write a placement that is not the default."""
    if placement != ON_DEVICES:
        fields = {name: getattr(placement, name) for name in _OF_CACHED}
        settings.placement.CopyFrom(PlacementSettings(where=placement.where.upper(), **fields))


def read_placement(settings: TableSettings) -> Placement:
    """Return the placement of a table. Raise ConfigError for a contradiction, or one of a newer penstock."""
    placement, number = settings.placement, settings.placement.where
    fields = {name: getattr(placement, name) if placement.HasField(name) else None for name in _OF_CACHED}
    return Placement(_WHERE[number] if 0 <= number < len(_WHERE) else f"number {number}", **fields)
