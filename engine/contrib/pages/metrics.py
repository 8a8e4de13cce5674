"""The metrics of an engine, or of a job: a collector for prometheus-client, Prometheus' text format, JSON.

Every counter of the Report is a metric, with its unit in its name; docs/reference/metrics.md has all of them.
``Counters``, ``Gate`` and ``Telemetry`` count; this module only names their counts.
"""

from __future__ import annotations

import collections
import math
import platform
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    from prometheus_client import Metric, generate_latest
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge
    from prometheus_client.core import InfoMetricFamily, SummaryMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("penstock.metrics: needs prometheus-client: pip install 'penstock[metrics]'") from error

import penstock
from penstock.core.sampling import hot_ids
from penstock.core.telemetry import MetricsSnapshot
from penstock.model.config.embedding import EmbeddingConfig
from penstock.rows.bridge.compile_counter import num_compiles

if TYPE_CHECKING:
    from penstock.api.engine import Engine
    from penstock.checkpoint.store import Commit

QUANTILES, AGE_QUANTILES = (0.5, 0.9, 0.99), (0.5, 0.95, 0.99)
# Of dynamic tables: the field of KeyReport → the metric.
KEY_METRICS: Mapping[str, tuple[str, type[Counter] | type[Gauge], str]] = {
    "keys": ("keys", Gauge, "keys that have a row"),
    "load": ("keys_ratio", Gauge, "keys over the rows of the table"),
    "waiting": ("waiting_keys", Gauge, "keys that wait for admission"),
    "expired_waiting": ("expired_waiting_keys", Gauge, "expired keys that still have a row, as no sweep came by"),
    "directory_bytes": ("directory_bytes", Gauge, "host memory of keys and waiting keys"),
    "admitted": ("admitted_keys_total", Counter, "keys that got a row"),
    "returned": ("returned_keys_total", Counter, "admitted keys that had lost a row before"),
    "expired": ("expired_keys_total", Counter, "keys that lost their row because they did not occur"),
    "evicted": ("evicted_keys_total", Counter, "keys that lost their row to others"),
    "rejected": ("rejected_keys_total", Counter, "keys that qualified for a row, without room for them"),
    "rolled_back": ("rolled_back_keys", Gauge, "keys that rollbacks brought back, less those that they removed"),
    "unadmitted_rows": ("unadmitted_rows_total", Counter, "gradient rows of keys not admitted, which are lost"),
}
# Of cached tables: the field of CacheReport → the metric.
CACHE_METRICS: Mapping[str, tuple[str, type[Counter] | type[Gauge], str]] = {
    "places": ("cache_rows", Gauge, "rows that have room on the devices"),
    "hits": ("cache_hits_total", Counter, "updated rows that were on the devices"),
    "up": ("cache_up_rows_total", Counter, "rows moved from the host to the devices"),
    "down": ("cache_down_rows_total", Counter, "rows moved back to the host"),
    "bytes": ("cache_moved_bytes_total", Counter, "bytes of rows moved up and down"),
    "waited_s": ("cache_waited_seconds_total", Counter, "time that the host waited for rows (waited_ms of a report)"),
}
# Of services: the field of the status → the metric.
SERVICE_METRICS: Mapping[str, tuple[str, type[Counter] | type[Gauge], str]] = {
    "queued_rows": ("queued_rows", Gauge, "rows of incomplete frames"),
    "queued_bytes": ("queued_bytes", Gauge, "memory of incomplete frames"),
    "producers": ("producers", Gauge, "names of producers whose positions are kept"),
    "streams": ("producer_streams", Gauge, "open streams of producers"),
    "connections": ("connections", Gauge, "open connections, at the last check"),
    "calls": ("calls", Gauge, "calls in progress"),
    "refused": ("refused_calls_total", Counter, "calls refused: a missing or wrong token, its role, --max-calls"),
    "lookups": ("lookups_total", Counter, "requests for rows that were answered"),
    "looked_up_rows": ("looked_up_rows_total", Counter, "rows in these answers"),
}


class StepCollector(Collector):
    """Metrics of something that steps, a collector that ``prometheus_client.REGISTRY.register`` takes."""

    @abstractmethod
    def checked_step(self) -> int:
        """Return the global step, without waiting for a frame. Raises StateError after a failed step."""

    def text(self) -> str:
        """Return the metrics in Prometheus' text format, version 0.0.4.

        Returns
        -------
        str
        """
        return generate_latest(self).decode()

    def plain(self) -> dict[str, Any]:
        """Return the metrics as plain data."""
        return plain(self.collect())


class MetricsCollector(StepCollector):
    """Metrics of snapshots. config : of the tables"""

    config: EmbeddingConfig

    @abstractmethod
    def snapshot(self) -> MetricsSnapshot:
        """Return the numbers of this moment."""

    @abstractmethod
    def look_closer(self) -> None:
        """Sample moments and hot ids from now on."""

    def collect(self) -> list[Metric]:
        """Return all metrics of a new snapshot.

        Returns
        -------
        list of prometheus_client.Metric
        """
        return list(metrics_of(self.snapshot()))

    def plain(self, of: MetricsSnapshot | None = None) -> dict[str, Any]:
        """Return the metrics as plain data.

        Parameters
        ----------
        of : MetricsSnapshot or None
            None: a new one.

        Returns
        -------
        dict of str
            Name → number, or name → label values joined by "," → number. NaN and infinity are None.
        """
        return plain(metrics_of(of or self.snapshot()))


class ReplicaMetrics(StepCollector):
    """The metrics of a replica. status : returns its status"""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        """Return all metrics of the current status."""
        status = self._status()
        steps = "openings of the gate since the tables were new"
        return [
            Gauge("penstock_global_steps", steps, status["global_step"]),
            Gauge("penstock_checkpoint_steps", "global step of the last commit", status["committed_step"]),
            Gauge("penstock_run_seconds", "seconds since the replica began", status["seconds"]),
            *service_metrics(status),
        ]

    def checked_step(self) -> int:
        step: int = self._status()["global_step"]
        return step


class Metrics(MetricsCollector):
    """The metrics of one engine, a collector that ``prometheus_client.REGISTRY.register`` takes.

    Parameters
    ----------
    engine : Engine
        Any thread may collect while it runs; it waits for the frame that is being applied.

    Notes
    -----
    Counters cover the current or last run, and frames applied outside runs. A new run resets them, which Prometheus
    treats as a restart. docs/reference/metrics.md lists the metrics.

    Examples
    --------
    >>> import penstock as ps
    >>> from penstock.metrics import Metrics
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5, 3], [[1.0, 2.0], [4.0, 4.0]])})
    True
    >>> Metrics(engine).plain()["penstock_rows_total"]
    2
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.config = engine, engine.config
        num_compiles()  # from here on

    def snapshot(self) -> MetricsSnapshot:
        """Return a consistent snapshot between two frames, except for the expired keys that wait: counted before.

        Returns
        -------
        MetricsSnapshot
        """
        engine, watch, gate, core = self._engine, self._engine.watch, self._engine.gate, self._engine.core
        expired_waiting = core.expired_waiting()
        with gate.still():
            commit, probe = engine.session.last, watch.probe
            samples = list(probe.hot.samples) if probe else []
            snapshot = MetricsSnapshot(
                counters=watch.counters.plus(core.counters),
                stale=gate.stale,
                global_step=gate.global_step,
                num_accumulated=core.num_pending,
                num_required=core.policy.num_required,
                late=gate.late,
                **({} if core.turns is None else core.turns.measures()),
                last_rates=core.last_rates or (),
                **core.norm_reports(),
                **watch.norm_reports(),
                tables=core.table_reports(expired_waiting),
                updated=watch.updated.copy(),
                num_steps=watch.num_steps,
                recent_s=list(watch.recent_s),
                stage_s=dict(watch.stage_s),
                num_compiles=num_compiles(),
                problems=tuple(core.tables.programs.problems),
                ages={stage: ages.copy() for stage, ages in core.freshness.ages.items()},
                seconds=watch.seconds,
                fraction=watch.fraction(),
                num_skipped=watch.num_skipped,
                of_service=None if watch.of_service is None else watch.of_service(),
                first_bad=dict(watch.first_bad),
                commit=None if commit is None else measured(*commit),
                moments=list(probe.moments) if probe else [],
            )
        return replace(snapshot, hot=hot_ids(samples))  # without the gate's lock

    def look_closer(self) -> None:
        self._engine.watch.look_closer()

    def checked_step(self) -> int:
        self._engine.core.failure.check_whole()
        return self._engine.global_step


def measured(commit: Commit, written_s: float | None) -> tuple[int, int, float | None]:
    """Return a commit as ``MetricsSnapshot`` has it. written_s : ``Folder.written_s``"""
    return sum(file.num_bytes for file in commit.files), commit.contents["global_step"], written_s


def plain(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return metrics as plain data, as ``MetricsCollector.plain`` does."""
    values: dict[str, Any] = {}
    for metric in metrics:
        for sample in metric.samples:
            value = sample.value if math.isfinite(sample.value) else None
            if sample.labels:
                values.setdefault(sample.name, {})[",".join(sample.labels.values())] = value
            else:
                values[sample.name] = value
    return values


def metrics_of(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """Yield all metrics of a snapshot."""
    for part in (_flow, _gate, _tables, _time, _checkpoint):
        yield from part(snapshot)
    yield from service_metrics(snapshot.of_service or {})


def service_metrics(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the build, and the metrics of a service. counts : as in its status; empty: not a service"""
    build = {"version": penstock.__version__, "python": platform.python_version()}
    yield InfoMetricFamily("penstock_build", "version of penstock and of Python", build)
    for name, (metric, kind, documentation) in SERVICE_METRICS.items():
        if name in counts:
            yield kind(f"penstock_{metric}", documentation, counts[name])


def _flow(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    counted, seconds = snapshot.counters, snapshot.seconds
    yield Counter("penstock_rows_total", "gradient rows read, of stale frames and dropped ones included", counted.rows)
    yield Counter("penstock_frames_total", "frames received, stale ones included", counted.frames)
    yield Counter("penstock_stale_frames_total", "frames dropped because their step was behind", counted.stale)
    yield Counter("penstock_stale_rows_total", "gradient rows read of stale frames", counted.stale_rows)
    yield labelled(
        "penstock_stale_lateness_frames_total",
        Counter,
        "stale frames by steps behind, rounded up to a power of two (5 to 8 count as 8), of all runs",
        "steps_behind",
        by_power_of_two(snapshot.stale.by_lateness),
    )
    dropped = "rows dropped, by reason (docs/bad_rows.md)"
    yield labelled("penstock_dropped_rows_total", Counter, dropped, "reason", counted.dropped)
    yield Counter("penstock_truncated_ids_total", "ids of examples beyond their sequence's length", counted.truncated)
    yield Counter("penstock_rolled_back_frames_total", "frames dropped from the gate by rollbacks", counted.rolled_back)
    not_finite = "rows whose weights or slots an update made infinite or NaN"
    yield Counter("penstock_not_finite_rows_total", not_finite, counted.not_finite)
    clipped = "steps whose gradients were scaled down to clip.global_norm"
    yield Counter("penstock_clipped_steps_total", clipped, counted.clipped_steps)
    clipped = "rows of gradients that were scaled down to clip.row_norm"
    yield Counter("penstock_clipped_rows_total", clipped, counted.clipped_rows)
    limited = "frames whose norm exceeded the limit of their contributor"
    yield labelled("penstock_limited_frames_total", Counter, limited, "contributor", counted.limited)
    skipped = "frames skipped on resume: the checkpoint contains them"
    yield Counter("penstock_skipped_frames_total", skipped, snapshot.num_skipped)
    yield Counter("penstock_steps_total", "openings of the gate", counted.steps)
    yield Gauge("penstock_run_seconds", "seconds since the run began, or that it took", seconds)
    yield Gauge("penstock_rows_per_second", "rows over the whole run", counted.rows / seconds if seconds else 0.0)
    yield Gauge("penstock_held_bytes", "most memory that the sums behind the gate took", counted.held_bytes)
    share = math.nan if snapshot.fraction is None else snapshot.fraction
    yield Gauge("penstock_input_read_ratio", "share of the input that is read; NaN if its length is unknown", share)


def _gate(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    yield Gauge("penstock_global_steps", "openings of the gate since the tables were new", snapshot.global_step)
    yield Gauge("penstock_pending_frames", "frames accumulated in the gate", snapshot.num_accumulated)
    yield Gauge("penstock_required_frames", "frames that open the gate", snapshot.num_required)
    late = "frames applied although their step was behind (`--max-staleness`)"
    yield labelled("penstock_late_frames_total", Counter, late, "steps_behind", by_power_of_two(snapshot.late))
    yield labelled("penstock_absent_steps_total", Counter, "rounds: steps without a frame", "worker", snapshot.absent)
    yield labelled(
        "penstock_early_frames", Gauge, "rounds: frames that wait for other workers", "worker", snapshot.early
    )
    yield Gauge("penstock_round_wait_seconds", "rounds: how long a step has waited for a worker", snapshot.waited_s)
    rates = dict(enumerate(snapshot.last_rates))
    yield labelled("penstock_learning_rate_ratio", Gauge, "of a dynamic tag, at the last step", "tag", rates)
    norm = "norm of the gradients of the last step, before they were scaled down; with clip or limit"
    yield labelled("penstock_table_gradient_norm", Gauge, norm, "table", snapshot.gradient_norms)
    norm = "median of the norms of the last 100 frames; with limit"
    yield labelled("penstock_contributor_norm", Gauge, norm, "contributor", snapshot.contributor_norms)
    norm = "root mean square of the changes of rows, of some rows of the last step that was sampled"
    yield labelled("penstock_table_update_norm", Gauge, norm, "table", snapshot.update_norms)


def _tables(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    tables, updated = snapshot.tables, {name: snapshot.updated.get(name, 0) for name in snapshot.tables}
    rows = {name: table.rows for name, table in tables.items()}
    yield labelled("penstock_table_rows_total", Counter, "gradient rows that entered the gate", "table", rows)
    distinct = {name: table.distinct for name, table in tables.items() if table.distinct is not None}
    of_static = "different ids among them; not of dynamic tables"
    yield labelled("penstock_table_distinct_ids", Gauge, of_static, "table", distinct)
    by_optimizer = "rows that the optimizer was applied to"
    yield labelled("penstock_table_updated_rows_total", Counter, by_optimizer, "table", updated)
    unique = {name: updated[name] / n if n else math.nan for name, n in rows.items()}
    yield labelled("penstock_table_unique_ratio", Gauge, "updated rows over gradient rows", "table", unique)
    for part, metrics in (("keys", KEY_METRICS), ("cache", CACHE_METRICS)):
        reports = {name: report for name, table in tables.items() if (report := getattr(table, part)) is not None}
        for number, (metric, kind, documentation) in metrics.items() if reports else ():
            values = {name: getattr(report, number) for name, report in reports.items()}
            yield labelled(f"penstock_table_{metric}", kind, documentation, "table", values)


def _time(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    steps = SummaryMetricFamily(
        "penstock_step_seconds",
        "time of an optimizer step of all tables, the last 1024; on an accelerator, of its dispatch",
        count_value=snapshot.num_steps,
        sum_value=snapshot.stage_s["step"],
    )
    # Values that occurred. The family has no argument for them.
    values = np.quantile(snapshot.recent_s or [math.nan], QUANTILES, method="inverted_cdf").tolist()
    for quantile, value in zip(QUANTILES, values, strict=True):
        steps.add_sample(steps.name, {"quantile": f"{quantile:g}"}, value)
    yield steps
    freshness = SummaryMetricFamily(
        "penstock_freshness_seconds",
        "from the time of a frame to its row, its delta and its commit; quantiles of its last 1024 times",
        labels=["until"],
    )
    for stage, ages in snapshot.ages.items():
        freshness.add_metric([stage], ages.num_frames, ages.sum_s)
        for quantile, value in zip(AGE_QUANTILES, ages.quantiles(AGE_QUANTILES), strict=True):
            freshness.add_sample(freshness.name, {"until": stage, "quantile": f"{quantile:g}"}, value)
    yield freshness
    stages = "time by stage: read (and decode), sum (and validate), step, save"
    yield labelled("penstock_stage_seconds_total", Counter, stages, "stage", snapshot.stage_s)
    problems = "failed canaries, kernels that did not compile, tables that moved or resumed by another variant"
    yield Counter("penstock_device_problems_total", problems, len(snapshot.problems))
    compiled = "programs JAX compiled or took from its cache, since the first scrape"
    yield Counter("penstock_compiles_total", compiled, snapshot.num_compiles)


def _checkpoint(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    """Yield the metrics of the last commit; none if there is none."""
    if snapshot.commit is None:
        return
    num_bytes, step, written_s = snapshot.commit
    age_s = math.nan if written_s is None else time.time() - written_s
    yield Gauge("penstock_checkpoint_age_seconds", "seconds since the last complete commit", age_s)
    yield Gauge("penstock_checkpoint_bytes", "bytes of the files that the last commit needs", num_bytes)
    yield Gauge("penstock_checkpoint_steps", "global step of the last commit", step)


def labelled(
    name: str, kind: type[Counter] | type[Gauge], documentation: str, label: str, values: Mapping[Any, float]
) -> Metric:
    """Return a metric family with one label. values : label value → number"""
    family = kind(name, documentation, labels=[label])
    for label_value, value in values.items():
        family.add_metric([str(label_value)], value)
    return family


def by_power_of_two(counts: Mapping[int, int]) -> Mapping[int, int]:
    """Return counts with their keys, whole numbers from 1 on, rounded up to powers of two: this bounds the series."""
    rounded: collections.Counter[int] = collections.Counter()
    for value, n in sorted(counts.items()):
        rounded[1 << (value - 1).bit_length()] += n
    return rounded
