"""An engine's state as named numbers: a registry of metrics, Prometheus' text format, JSON.

Every counter of the Report is a metric, with its unit in its name (docs/metrics.md). What is counted is counted in one
place, ``Counters``, ``Gate`` and ``Watch``; here it is only given a name.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.stats import Counters, ProcessReport, TableReport, summed

if TYPE_CHECKING:
    from penstock.engine import Engine

QUANTILES = (0.5, 0.9, 0.99)
Labels = Mapping[str, str]


class Metric(NamedTuple):
    """kind : "counter", "gauge" or "summary"; samples : (suffix of the name, labels, value)"""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]


class Metrics:
    """The metrics of one engine. May be asked from any thread, also while the engine runs: it then waits for a frame.

    Counters are those of the run that goes on or was the last, and of what was applied without one; a new run begins
    them anew, which Prometheus takes for a restart.
    """

    def __init__(self, engine: Engine) -> None:
        from penstock.bridge.compile_counter import num_compiles

        self._engine, self._compiles = engine, num_compiles

    def collect(self) -> list[Metric]:
        """All of them, of one moment between two frames."""
        with self._engine.gate.still():
            several = self._engine.processes
            flow = [*self._flow(several), *self._gate(), *self._tables(several), *self._time(), *self._checkpoint()]
            return [*flow, *_processes(several)] if several else flow

    def text(self) -> str:
        """Prometheus' text format, version 0.0.4."""
        lines = []
        for metric in self.collect():
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{suffix}{braced(of)} {number(value)}" for suffix, of, value in metric.samples]
        return "\n".join(lines) + "\n"

    def plain(self) -> dict[str, Any]:
        """Name → number, or label values joined by "," → number. What is not a number is None."""
        found: dict[str, Any] = {}
        for metric in self.collect():
            for suffix, labels, value in metric.samples:
                known = value if math.isfinite(value) else None
                if labels:
                    found.setdefault(metric.name + suffix, {})[",".join(labels.values())] = known
                else:
                    found[metric.name + suffix] = known
        return found

    def _counters(self) -> Counters:
        return self._engine.watch.counters.plus(self._engine.core.counters)

    def _flow(self, several: Sequence[ProcessReport]) -> Iterator[Metric]:
        of, watch = self._counters(), self._engine.watch
        seconds = watch.seconds
        yield counter("penstock_rows_total", "gradient rows read, of stale frames and dropped ones included", of.rows)
        yield counter("penstock_frames_total", "frames received, stale ones included", of.frames)
        yield counter("penstock_stale_frames_total", "frames dropped because their step was behind", of.stale)
        yield counter("penstock_stale_rows_total", "gradient rows read of stale frames", of.stale_rows)
        yield labelled(
            "penstock_stale_lateness_frames_total",
            "counter",
            "stale frames by steps behind, rounded up to a power of two (5 to 8 count as 8), of all runs",
            "steps_behind",
            by_power_of_two(self._engine.gate.stale.by_lateness),
        )
        yield labelled(
            "penstock_dropped_rows_total",
            "counter",
            "rows left out, by reason (docs/bad_rows.md)",
            "reason",
            of.dropped,
        )
        yield counter("penstock_truncated_ids_total", "ids of examples beyond their sequence's length", of.truncated)
        skipped = "frames read again and left out: the checkpoint held them already"
        yield counter("penstock_skipped_frames_total", skipped, watch.num_skipped)
        yield counter("penstock_steps_total", "openings of the gate", of.steps)
        yield gauge("penstock_run_seconds", "how long the run goes on, or went on", seconds)
        yield gauge("penstock_rows_per_second", "rows over the whole run", of.rows / seconds if seconds else 0.0)
        held = sum(process.held_bytes for process in several) if several else of.held_bytes
        yield gauge("penstock_held_bytes", "most memory that the sums behind the gate took", held)
        share = watch.share()
        yield gauge(
            "penstock_input_read_ratio", "share of the input that is read", math.nan if share is None else share
        )

    def _gate(self) -> Iterator[Metric]:
        gate = self._engine.gate
        yield gauge("penstock_global_steps", "openings of the gate since the tables were new", gate.global_step)
        yield gauge("penstock_pending_frames", "frames that the gate holds", gate.num_accumulated)
        yield gauge("penstock_required_frames", "frames that open the gate", gate.num_required or 0)
        queued = self._engine.watch.queued_rows
        if queued is not None:
            yield gauge("penstock_queued_rows", "rows that wait in frames that are not whole yet", queued())
        rates = self._engine.core.last_rates or ()
        yield labelled(
            "penstock_learning_rate_ratio", "gauge", "of a dynamic tag, at the last step", "tag", dict(enumerate(rates))
        )

    def _tables(self, several: Sequence[ProcessReport]) -> Iterator[Metric]:
        tables: Mapping[str, TableReport] = self._engine.core.table_reports()
        updated = self._engine.watch.updated
        if several:
            tables, updated = summed(several)
        rows = {name: table.rows for name, table in tables.items()}
        yield labelled("penstock_table_rows_total", "counter", "gradient rows that entered the gate", "table", rows)
        distinct = {name: table.distinct for name, table in tables.items()}
        yield labelled("penstock_table_distinct_ids", "gauge", "different ids among them", "table", distinct)
        yield labelled(
            "penstock_table_updated_rows_total",
            "counter",
            "rows that the optimizer was applied to",
            "table",
            {name: updated[name] for name in tables},
        )
        unique = {name: updated[name] / n if n else math.nan for name, n in rows.items()}
        yield labelled("penstock_table_unique_ratio", "gauge", "updated rows over gradient rows", "table", unique)

    def _time(self) -> Iterator[Metric]:
        watch = self._engine.watch
        recent = sorted(watch.recent_s)
        of = [("", {"quantile": f"{q:g}"}, quantile(recent, q)) for q in QUANTILES]
        of += [("_sum", {}, watch.stage_s["step"]), ("_count", {}, float(watch.num_steps))]
        told = "time of an optimizer step of all tables, the last 1024; on an accelerator, of its dispatch"
        yield Metric("penstock_step_seconds", "summary", told, tuple(of))
        yield labelled("penstock_stage_seconds_total", "counter", "time by stage", "stage", watch.stage_s)
        yield counter("penstock_compiles_total", "programs JAX compiled or took from its cache", self._compiles())

    def _checkpoint(self) -> Iterator[Metric]:
        """Nothing where nothing was committed."""
        last = self._engine.session.last
        if last is None:
            return
        commit, manifest = last
        written_s = manifest.stat().st_mtime if manifest.exists() else math.nan
        yield gauge("penstock_checkpoint_age_seconds", "since the last commit was whole", time.time() - written_s)
        num_bytes = sum(file.num_bytes for file in commit.files)
        yield gauge("penstock_checkpoint_bytes", "of the files that the last commit needs", num_bytes)
        yield gauge("penstock_checkpoint_steps", "global step of the last commit", commit.contents["global_step"])


def _processes(several: Sequence[ProcessReport]) -> Iterator[Metric]:
    """What each process of a job did by itself, by its number."""

    def of(name: str, kind: str, told: str, numbers: Iterable[float]) -> Metric:
        return labelled(f"penstock_process_{name}", kind, told, "process", dict(enumerate(numbers)))

    def by(name: str, told: str, label: str, numbers: Iterable[Mapping[str, float]]) -> Metric:
        samples = [("", {"process": str(n), label: key}, v) for n, of in enumerate(numbers) for key, v in of.items()]
        return Metric(f"penstock_process_{name}", "counter", told, tuple(samples))

    yield counter("penstock_sent_bytes_total", "that processes sent each other", sum(p.sent_bytes for p in several))
    yield of("rows_total", "counter", "gradient rows read from its sources", (p.rows for p in several))
    yield by("dropped_rows_total", "of them left out, by reason", "reason", (p.dropped for p in several))
    yield of("own_rows_total", "counter", "gradient rows of ids that are its own", (p.own_rows for p in several))
    updated = (sum(p.updated.values()) for p in several)
    yield of("updated_rows_total", "counter", "rows that its optimizer was applied to", updated)
    yield of("held_bytes", "gauge", "most memory that its sums behind the gate took", (p.held_bytes for p in several))
    yield of("sent_bytes_total", "counter", "that it sent to the others", (p.sent_bytes for p in several))
    yield by("stage_seconds_total", "its time by stage", "stage", (p.stage_s for p in several))


def counter(name: str, told: str, value: float) -> Metric:
    return Metric(name, "counter", told, (("", {}, value),))


def gauge(name: str, told: str, value: float) -> Metric:
    return Metric(name, "gauge", told, (("", {}, value),))


def labelled(name: str, kind: str, told: str, label: str, values: Mapping[Any, float]) -> Metric:
    return Metric(name, kind, told, tuple(("", {label: str(key)}, value) for key, value in values.items()))


def by_power_of_two(counts: Mapping[int, int]) -> Mapping[int, int]:
    """Counts by whole numbers from 1 on, each rounded up to a power of two: a few series, however many numbers."""
    rounded: Counter[int] = Counter()
    for value, n in sorted(counts.items()):
        rounded[1 << (value - 1).bit_length()] += n
    return rounded


def quantile(ascending: list[float], share: float) -> float:
    """The value that so many are not above; NaN where there are none."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else math.nan


def braced(labels: Labels) -> str:
    """``{table="user"}``."""
    return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items()) + "}" if labels else ""


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """Whole numbers without a point, NaN as Prometheus writes it."""
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
