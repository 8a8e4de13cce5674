"""``Dynamic``: the settings of a table whose ids are 64-bit keys, in Python and in ``TableSettings.dynamic``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import TableSettings

MAX_COUNT = 2**31 - 1  # of occurrences, steps and units of the clock: a directory counts in int32
# Each setting: its argument of Dynamic, the message in DynamicSettings that has its field ("": DynamicSettings), the
# name of the field, and the values of an enum in the order of their numbers. The first one is the default.
_FIELDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("key_type", "", "key_type", ("int64", "uint64")),
    ("min_count", "admit", "min_count", ()),
    ("count", "admit", "count", ("rows", "frames")),
    ("forget_after", "admit", "forget_after", ()),
    ("probability", "admit", "probability", ()),
    ("expire_after", "expire", "after", ()),
    ("clock", "expire", "clock", ("steps", "time")),
    ("evict", "evict", "by", ("lru", "lfu")),
    ("half_life", "evict", "half_life", ()),
    ("on_full", "", "on_full", ("error", "reject")),
    ("missing", "", "missing", ("initial", "zero")),
)


@dataclass(frozen=True)
class Dynamic:
    """The settings of a table whose ids are 64-bit keys: which keys get a row, and which keys lose theirs.

    Parameters
    ----------
    min_count : int
        Admit a key when it occurs for the ``min_count``-th time; 1: when it first occurs.
    count : {"rows", "frames"}
        The occurrences that ``min_count`` counts: gradient rows of the key, or frames that contain it.
    forget_after : int or None
        Steps after which the occurrences of a waiting key are forgotten; up to twice as many may pass. None: they are
        forgotten when as many keys wait as the table has rows.
    probability : float or None
        Admit a key with this probability, 0 to 1, at each of its rows. None: admit it by ``min_count``.
    expire_after : int or None
        Remove a key when the clock has advanced by more than this since the key's last row. None: never.
    clock : {"steps", "time"}
        The clock that expiry and eviction use: the global step, or the seconds in the stream's column ``time``.
    evict : {"lru", "lfu"} or None
        Which key loses its row when a new key needs room in a full table: the least recently used, or the least
        frequently used. None: no key does.
    half_life : int or None
        Units of the clock. The counts of "lfu" are halved whenever the clock passes a multiple of it; "lfu" needs it.
    on_full : {"error", "reject"}
        If a new key finds no room: raise CapacityError, or let the key wait.
    missing : {"initial", "zero"}
        What a lookup of a key without a row returns: the key's initial row, or zeros.
    key_type : {"int64", "uint64"}
        The type of the keys, which have 64 bits.

    Raises
    ------
    ConfigError
        If a setting is out of range, or settings contradict each other.

    Notes
    -----
    The table's ``vocabulary_size`` is the number of keys that can have a row at the same time (docs/dynamic.md).
    Settings of type int are from 1 to 2**31 - 1.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(1000, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic(min_count=2))
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> for _ in range(2):
    ...     applied = engine.apply({"user": ([2**40, -7, 2**40], [[1.0, 2.0]] * 3)})
    >>> engine.keys("user").to_pylist()
    [-7, 1099511627776]
    >>> engine.lookup("user", [-7])
    array([[0.9, 0.8]], dtype=float32)
    """

    min_count: int = 1
    count: str = "rows"
    forget_after: int | None = None
    probability: float | None = None
    expire_after: int | None = None
    clock: str = "steps"
    evict: str | None = None
    half_life: int | None = None
    on_full: str = "error"
    missing: str = "initial"
    key_type: str = "int64"

    def __post_init__(self) -> None:
        for name, _, _, values in _FIELDS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if values:
                if value not in values:
                    raise ConfigError(f"{name} must be one of {', '.join(values)}, got {value!r}")
            elif name == "probability":
                if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
                    raise ConfigError(f"probability must be a number from 0 to 1, got {value!r}")
                object.__setattr__(self, name, float(value))
            elif isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= MAX_COUNT:
                raise ConfigError(f"{name} must be an int from 1 to {MAX_COUNT}, got {value!r}")
            else:
                object.__setattr__(self, name, int(value))  # commits store it as JSON, which takes no NumPy integer
        for problem, fix in _contradictions(self):
            raise ConfigError(f"{problem}; {fix}")

    @property
    def counts_rows(self) -> bool:
        """Whether a decision depends on how many rows a key has in a step."""
        return self.min_count > 1 or self.probability is not None or self.evict == "lfu" or self.on_full == "reject"


# Messages that are refused if they are empty → the fields that the error suggests.
_SUGGESTED_FIELDS = {"admit": "min_count or probability", "expire": "after"}
_OPTIONAL = {field.name for field in fields(Dynamic) if field.default is None}


def _contradictions(dynamic: Dynamic) -> Iterator[tuple[str, str]]:
    """Yield every contradiction between settings as (problem, fix)."""
    if dynamic.probability is not None:
        for name, default in (("min_count", 1), ("count", "rows"), ("forget_after", None)):
            if getattr(dynamic, name) != default:
                yield f"probability and {name} exclude each other", "give one of them"
    elif dynamic.min_count == 1:
        if dynamic.count != "rows":
            yield f"count '{dynamic.count}' belongs to min_count", "say after how many a key is admitted"
        if dynamic.forget_after is not None and dynamic.on_full != "reject":
            yield "forget_after belongs to min_count", "say after how many occurrences a key is admitted"
    if dynamic.clock == "time" and dynamic.expire_after is None and dynamic.evict is None:
        yield "clock 'time' needs expire_after or evict", "say after how many seconds a key expires"
    if dynamic.evict == "lfu" and dynamic.half_life is None:
        yield "evict 'lfu' needs half_life", "say after how many units of the clock a count is halved"
    if dynamic.evict != "lfu" and dynamic.half_life is not None:
        yield "half_life belongs to evict 'lfu'", "use evict 'lfu', or remove half_life"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the settings that are not the default, such as "min_count 2, evict lru". settings : argument → value"""
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value != getattr(_DEFAULT, name))


def write_dynamic(settings: TableSettings, dynamic: Dynamic) -> None:
    """Write the settings that differ from the default into the message ``settings.dynamic``."""
    settings.dynamic.SetInParent()
    for name, message, field, values in _FIELDS:
        value = getattr(dynamic, name)
        if value != getattr(_DEFAULT, name):
            target = getattr(settings.dynamic, message) if message else settings.dynamic
            setattr(target, field, values.index(value) if values else value)
            target.SetInParent()


def read_dynamic(settings: TableSettings) -> Dynamic | None:
    """Return the message ``settings.dynamic`` as a Dynamic; None if the table is not dynamic. Raises ConfigError."""
    if not settings.HasField("dynamic"):
        return None
    arguments: dict[str, Any] = {}
    for name, message, field, values in _FIELDS:
        if message and not settings.dynamic.HasField(message):
            continue
        source = getattr(settings.dynamic, message) if message else settings.dynamic
        if message in _SUGGESTED_FIELDS and not source.ByteSize():
            raise ConfigError(f"{message} {{ }} sets nothing; give {_SUGGESTED_FIELDS[message]}, or remove it")
        value = getattr(source, field)
        if values:
            arguments[name] = values[value] if value < len(values) else value
        elif source.HasField(field):
            arguments[name] = value
    return Dynamic(**arguments)


_DEFAULT = Dynamic()
