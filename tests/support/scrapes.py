"""Scrapes of an engine's metrics, and the values they must have."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from batches import batch, lists
from limits import HANG_S
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from penstock.contrib.pages.http_server import TEXT

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
UNITS = ("total", "seconds", "bytes", "ratio", "frames", "steps", "ids", "keys", "rows", "per_second", "info")
UNITS += ("producers", "streams", "connections", "calls", "norm")
# Every number of the report, and the metric that says it; what is left says no number.
METRIC_OF = {
    "rows": "penstock_rows_total",
    "frames": "penstock_frames_total",
    "stale": "penstock_stale_frames_total",
    "pending": "penstock_pending_frames",
    "steps": "penstock_steps_total",
    "global_step": "penstock_global_steps",
    "seconds": "penstock_run_seconds",
    "rows_per_s": "penstock_rows_per_second",
    "dropped": "penstock_dropped_rows_total",
    "tables": (
        "penstock_table_rows_total",
        "penstock_table_distinct_ids",
        "penstock_table_keys",
        "penstock_table_cache_rows",
    ),
    "learning_rates": "penstock_learning_rate_ratio",
    "held_bytes": "penstock_held_bytes",
    "skipped": "penstock_skipped_frames_total",
    "truncated": "penstock_truncated_ids_total",
    "stale_rows": "penstock_stale_rows_total",
    "rolled_back": "penstock_rolled_back_frames_total",
    "device_problems": "penstock_device_problems_total",
    "not_finite": "penstock_not_finite_rows_total",
    "late": "penstock_late_frames_total",
    "clipped_steps": "penstock_clipped_steps_total",
    "clipped_rows": "penstock_clipped_rows_total",
    "limited": "penstock_limited_frames_total",
    "gradient_norms": "penstock_table_gradient_norm",
    "contributor_norms": "penstock_contributor_norm",
    "update_norms": "penstock_table_update_norm",
    "absent": "penstock_absent_steps_total",
}
# Every number of the keys of a dynamic table, and its metric.
METRIC_OF_KEYS = {
    "keys": "penstock_table_keys",
    "load": "penstock_table_keys_ratio",
    "waiting": "penstock_table_waiting_keys",
    "expired_waiting": "penstock_table_expired_waiting_keys",
    "directory_bytes": "penstock_table_directory_bytes",
    "admitted": "penstock_table_admitted_keys_total",
    "returned": "penstock_table_returned_keys_total",
    "expired": "penstock_table_expired_keys_total",
    "evicted": "penstock_table_evicted_keys_total",
    "rejected": "penstock_table_rejected_keys_total",
    "unadmitted_rows": "penstock_table_unadmitted_rows_total",
    "rolled_back": "penstock_table_rolled_back_keys",
}
# Every number of the moves of a cached table, and its metric.
METRIC_OF_CACHE = {
    "places": "penstock_table_cache_rows",
    "hits": "penstock_table_cache_hits_total",
    "up": "penstock_table_cache_up_rows_total",
    "down": "penstock_table_cache_down_rows_total",
    "bytes": "penstock_table_cache_moved_bytes_total",
    "waited_ms": "penstock_table_cache_waited_seconds_total",
}
NO_NUMBERS = {"first_not_finite", "verified", "unverified", "state_hash", "notes", "variants"}


def config_of(*more):
    """Two tables, one of a name that needs escapes, with a rate that frames give. more : tables"""
    tables = [ps.TableConfig(50, 2, name="user"), ps.TableConfig(9, 2, name='it"em'), *more]
    return ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(ps.DynamicLearningRate(0)))


def batches(num=12):
    """Frames of four rows; every fifth is stale, and each has one bad row."""
    rates = lists([[0.5]] * 4)
    for number in range(num):
        step = number // 2 - 2 if number % 5 == 4 else 10**6
        yield batch([1, 2, 1, 99], table="user", step=step, contributor=number, learning_rates=rates)


def parsed(text):
    """Prometheus' text → {sample: value}."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {sample: float(value) for sample, value in lines}


def described(text):
    """Prometheus' text → {name: (type, names of its labels)}, as its own parser reads it."""
    results = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        results[family.name + "_total" * (family.type == "counter")] = family.type, labels
    return results


def documented():
    """The list of docs/reference/metrics.md → {name: (type, names of its labels)}."""
    items = re.findall(r"^- `(penstock_\w+)` \((\w+)(?:; ([^)]*))?\):", METRICS_PAGE.read_text(), re.MULTILINE)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in items}


def fetched(url):
    """The text of a page."""
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        return answer.read().decode()


def scraped(url):
    """The metrics of a page, as ``parsed`` gives them."""
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        assert answer.headers["Content-Type"] == TEXT
        return parsed(answer.read().decode())


def same_as_report(values, report):
    """Every number of the report is a metric."""
    assert values["penstock_rows_total"] == report["rows"]
    assert values["penstock_frames_total"] == report["frames"]
    assert values["penstock_stale_frames_total"] == report["stale"]
    assert values["penstock_stale_rows_total"] == report["stale_rows"]
    assert values["penstock_steps_total"] == report["steps"]
    assert values["penstock_pending_frames"] == report["pending"]
    assert values["penstock_global_steps"] == report["global_step"]
    assert values["penstock_held_bytes"] == report["held_bytes"]
    assert values["penstock_skipped_frames_total"] == report["skipped"]
    assert values["penstock_not_finite_rows_total"] == report["not_finite"]
    assert values["penstock_truncated_ids_total"] == report["truncated"]
    assert values["penstock_run_seconds"] == pytest.approx(report["seconds"], rel=0.5, abs=0.1)
    for reason, number in report["dropped"].items():
        assert values[f'penstock_dropped_rows_total{{reason="{reason}"}}'] == number
    for name, table in report["tables"].items():
        escaped = name.replace('"', '\\"')
        assert values[f'penstock_table_rows_total{{table="{escaped}"}}'] == table["rows"]
        if "cache" in table:
            assert table["cache"].keys() == METRIC_OF_CACHE.keys()
            for number, metric in METRIC_OF_CACHE.items():
                unit = 1000 if number == "waited_ms" else 1
                assert unit * values[f'{metric}{{table="{escaped}"}}'] == pytest.approx(table["cache"][number]), number
        if "keys" in table:
            assert table["keys"].keys() == METRIC_OF_KEYS.keys()
            for number, metric in METRIC_OF_KEYS.items():
                assert values[f'{metric}{{table="{escaped}"}}'] == table["keys"][number], number
        else:
            assert values[f'penstock_table_distinct_ids{{table="{escaped}"}}'] == table["distinct"]
    for tag, rate in enumerate(report["learning_rates"] or ()):
        assert values[f'penstock_learning_rate_ratio{{tag="{tag}"}}'] == pytest.approx(rate)
