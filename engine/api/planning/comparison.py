"""The choices of a plan next to each other, as the cells of two tables: of dynamic tables, and of cached ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.api.planning.cached_rows import CacheForecast
from penstock.api.planning.forecast import Forecast, TableForecast
from penstock.base.quantities import count, size_text
from penstock.model.stats import percent

NEVER = "never"
# Shown of each table: heading, and the name in KeyReport.
_COLUMNS = (
    ("keys", "keys"),
    ("lost rows", "unadmitted_rows"),
    ("evicted", "evicted"),
    ("returned", "returned"),
    ("expired", "expired"),
    ("rejected", "rejected"),
)


def compared(forecasts: Sequence[Forecast]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the headings and lines of each table of choices that has lines."""
    dynamic = [_cells(choice, *table) for choice in forecasts for table in choice.tables().items()]
    cached = [_cells_of_cached(choice, *table) for choice in forecasts for table in choice.cached().items()]
    for headings, lines in ((_HEADINGS, dynamic), (_CACHED_HEADINGS, cached)):
        if lines:
            yield headings, lines


_HEADINGS = ["table", "capacity", "min count", "expire", *(heading for heading, _ in _COLUMNS), "host", "device", ""]


def _cells(forecast: Forecast, name: str, table: TableForecast) -> list[str]:
    """Return a line of the table of choices; an estimate carries its standard error."""
    settings, full = forecast.specs[name].dynamic, forecast.full
    assert settings is not None
    filter_of = str(settings.min_count) if settings.probability is None else f"p {settings.probability:g}"
    end = "" if table.share == 1 else f"1/{1 / table.share:.0f} of the keys"
    if full is not None:
        end = f"full at step {count(full.step)}" + ("" if full.table == name else f", by '{full.table}'")
    return [
        name,
        count(table.capacity),
        filter_of,
        NEVER if settings.expire_after is None else count(settings.expire_after),
        *(_number(getattr(table.report, key), table.standard_error.get(key)) for _, key in _COLUMNS),
        size_text(table.report.directory_bytes),
        size_text(table.device_bytes),
        end,
    ]


_CACHED_HEADINGS = ["cached", "rows", "device", "places", "ahead", "hits", "up", "missed", "down", "moved", ""]


def _cells_of_cached(forecast: Forecast, name: str, table: CacheForecast) -> list[str]:
    """Return a line of the table of caches."""
    return [
        name,
        count(table.num_rows),
        size_text(table.device_bytes),
        count(table.places),
        count(table.look_ahead),
        count(table.hits),
        count(table.up),
        percent(table.up, table.hits + table.up),
        count(table.down),
        size_text(table.bytes),
        "" if forecast.full is None else f"until step {count(forecast.full.step)}",
    ]


def _number(value: int, error: float | None) -> str:
    return count(value) if error is None else f"{count(value)} ± {count(error)}"
