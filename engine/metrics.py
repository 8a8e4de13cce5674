"""The metrics of an engine: a collector for prometheus-client, Prometheus' text format, JSON.

Every counter of the Report is a metric, with its unit in its name (docs/metrics.md). ``Counters``, ``Gate`` and
``Telemetry`` count; this module only names their counts.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Sample, SummaryMetricFamily
from prometheus_client.registry import Collector

from penstock.stats import Counters, TableReport

if TYPE_CHECKING:
    from penstock.engine import Engine

QUANTILES = (0.5, 0.9, 0.99)
# Of dynamic tables: the field of KeyReport → the metric.
KEY_METRICS: Mapping[str, tuple[str, type[Counter] | type[Gauge], str]] = {
    "keys": ("keys", Gauge, "keys that have a row"),
    "load": ("keys_ratio", Gauge, "keys over the rows of the table"),
    "waiting": ("waiting_keys", Gauge, "keys that wait for admission"),
    "expired_waiting": ("expired_waiting_keys", Gauge, "expired keys that still have a row"),
    "directory_bytes": ("directory_bytes", Gauge, "memory of keys and waiting keys"),
    "admitted": ("admitted_keys_total", Counter, "keys that got a row"),
    "returned": ("returned_keys_total", Counter, "admitted keys that had lost a row before"),
    "expired": ("expired_keys_total", Counter, "keys that lost their row because they had not occurred"),
    "evicted": ("evicted_keys_total", Counter, "keys that lost their row to others"),
    "rejected": ("rejected_keys_total", Counter, "keys that were due and found no room"),
    "unadmitted_rows": ("unadmitted_rows_total", Counter, "gradient rows of keys that were not admitted"),
}


class Metrics(Collector):
    """The metrics of one engine, a collector that ``prometheus_client.REGISTRY.register`` takes.

    Any thread may collect while the engine runs; it waits for the frame that is being applied.

    Counters cover the current or last run, and frames applied outside runs. A new run resets them, which Prometheus
    treats as a restart.
    """

    def __init__(self, engine: Engine) -> None:
        from penstock.bridge.compile_counter import num_compiles

        self._engine, self._compiles = engine, num_compiles

    def collect(self, expired_waiting: Mapping[str, int] | None = None) -> list[Metric]:
        """Return all metrics: a consistent snapshot between two frames, except for the expired keys that wait.

        expired_waiting : ``EngineCore.expired_waiting``, for a caller with the gate's lock; None: count them before
        """
        if expired_waiting is None:
            expired_waiting = self._engine.core.expired_waiting()
        with self._engine.gate.still():
            tables = self._tables(self._engine.core.table_reports(expired_waiting))
            return [*self._flow(), *self._gate(), *tables, *self._time(), *self._checkpoint()]

    def text(self) -> str:
        """Return the metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self).decode()

    def plain(self, expired_waiting: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return name → number, or name → label values joined by "," → number. NaN and infinity are None.

        expired_waiting : as for ``collect``
        """
        found: dict[str, Any] = {}
        for metric in self.collect(expired_waiting):
            for sample in metric.samples:
                value = sample.value if math.isfinite(sample.value) else None
                if sample.labels:
                    found.setdefault(sample.name, {})[",".join(sample.labels.values())] = value
                else:
                    found[sample.name] = value
        return found

    def _counters(self) -> Counters:
        return self._engine.watch.counters.plus(self._engine.core.counters)

    def _flow(self) -> Iterator[Metric]:
        of, watch = self._counters(), self._engine.watch
        seconds = watch.seconds
        yield Counter("penstock_rows_total", "gradient rows read, of stale frames and dropped ones included", of.rows)
        yield Counter("penstock_frames_total", "frames received, stale ones included", of.frames)
        yield Counter("penstock_stale_frames_total", "frames dropped because their step was behind", of.stale)
        yield Counter("penstock_stale_rows_total", "gradient rows read of stale frames", of.stale_rows)
        yield labelled(
            "penstock_stale_lateness_frames_total",
            Counter,
            "stale frames by steps behind, rounded up to a power of two (5 to 8 count as 8), of all runs",
            "steps_behind",
            by_power_of_two(self._engine.gate.stale.by_lateness),
        )
        yield labelled(
            "penstock_dropped_rows_total",
            Counter,
            "rows left out, by reason (docs/bad_rows.md)",
            "reason",
            of.dropped,
        )
        yield Counter("penstock_truncated_ids_total", "ids of examples beyond their sequence's length", of.truncated)
        skipped = "frames read again and left out: the checkpoint held them already"
        yield Counter("penstock_skipped_frames_total", skipped, watch.num_skipped)
        yield Counter("penstock_steps_total", "openings of the gate", of.steps)
        yield Gauge("penstock_run_seconds", "seconds since the run began, or that it took", seconds)
        yield Gauge("penstock_rows_per_second", "rows over the whole run", of.rows / seconds if seconds else 0.0)
        yield Gauge("penstock_held_bytes", "most memory that the sums behind the gate took", of.held_bytes)
        share = watch.share()
        yield Gauge(
            "penstock_input_read_ratio", "share of the input that is read", math.nan if share is None else share
        )

    def _gate(self) -> Iterator[Metric]:
        gate = self._engine.gate
        yield Gauge("penstock_global_steps", "openings of the gate since the tables were new", gate.global_step)
        yield Gauge("penstock_pending_frames", "frames that the gate holds", gate.num_accumulated)
        yield Gauge("penstock_required_frames", "frames that open the gate", gate.num_required or 0)
        queued = self._engine.watch.queued_rows
        if queued is not None:
            yield Gauge("penstock_queued_rows", "rows that wait in frames that are not whole yet", queued())
        rates = self._engine.core.last_rates or ()
        yield labelled(
            "penstock_learning_rate_ratio", Gauge, "of a dynamic tag, at the last step", "tag", dict(enumerate(rates))
        )

    def _tables(self, tables: Mapping[str, TableReport]) -> Iterator[Metric]:
        keys = {name: table.keys for name, table in tables.items() if table.keys is not None}
        updated = self._engine.watch.updated
        rows = {name: table.rows for name, table in tables.items()}
        yield labelled("penstock_table_rows_total", Counter, "gradient rows that entered the gate", "table", rows)
        distinct = {name: table.distinct for name, table in tables.items() if table.distinct is not None}
        yield labelled("penstock_table_distinct_ids", Gauge, "different ids among them", "table", distinct)
        yield labelled(
            "penstock_table_updated_rows_total",
            Counter,
            "rows that the optimizer was applied to",
            "table",
            {name: updated[name] for name in tables},
        )
        unique = {name: updated[name] / n if n else math.nan for name, n in rows.items()}
        yield labelled("penstock_table_unique_ratio", Gauge, "updated rows over gradient rows", "table", unique)
        for number, (metric, kind, documentation) in KEY_METRICS.items():
            values = {name: getattr(of, number) for name, of in keys.items()}
            if keys:
                yield labelled(f"penstock_table_{metric}", kind, documentation, "table", values)

    def _time(self) -> Iterator[Metric]:
        watch = self._engine.watch
        recent = sorted(watch.recent_s)
        yield summary(
            "penstock_step_seconds",
            "time of an optimizer step of all tables, the last 1024; on an accelerator, of its dispatch",
            {q: quantile(recent, q) for q in QUANTILES},
            watch.num_steps,
            watch.stage_s["step"],
        )
        yield labelled("penstock_stage_seconds_total", Counter, "time by stage", "stage", watch.stage_s)
        problems = "failed canaries, kernels that did not compile, tables that moved or resumed by another variant"
        yield Counter("penstock_device_problems_total", problems, len(self._engine.core.tables.programs.problems))
        yield Counter("penstock_compiles_total", "programs JAX compiled or took from its cache", self._compiles())

    def _checkpoint(self) -> Iterator[Metric]:
        """Yield the metrics of the last commit; none if there is none."""
        last = self._engine.session.last
        if last is None:
            return
        commit, written_s = last
        age_s = math.nan if written_s is None else time.time() - written_s
        yield Gauge("penstock_checkpoint_age_seconds", "since the last commit was whole", age_s)
        num_bytes = sum(file.num_bytes for file in commit.files)
        yield Gauge("penstock_checkpoint_bytes", "of the files that the last commit needs", num_bytes)
        yield Gauge("penstock_checkpoint_steps", "global step of the last commit", commit.contents["global_step"])


def labelled(
    name: str, kind: type[Counter] | type[Gauge], documentation: str, label: str, values: Mapping[Any, float]
) -> Metric:
    """Return a metric family with one label. values : label value → number"""
    made = kind(name, documentation, labels=[label])
    for of, value in values.items():
        made.add_metric([str(of)], value)
    return made


def summary(name: str, documentation: str, quantiles: Mapping[float, float], num: int, total: float) -> Metric:
    """Return a summary with quantiles, for which SummaryMetricFamily has no argument."""
    made = SummaryMetricFamily(name, documentation, count_value=num, sum_value=total)
    made.samples += [Sample(name, {"quantile": f"{q:g}"}, value) for q, value in quantiles.items()]
    return made


def by_power_of_two(counts: Mapping[int, int]) -> Mapping[int, int]:
    """Return counts with their keys, whole numbers from 1 on, rounded up to powers of two: this bounds the series."""
    rounded: collections.Counter[int] = collections.Counter()
    for value, n in sorted(counts.items()):
        rounded[1 << (value - 1).bit_length()] += n
    return rounded


def quantile(ascending: list[float], share: float) -> float:
    """Return a quantile by nearest rank; NaN if there are no values. share : 0 to 1"""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else math.nan
