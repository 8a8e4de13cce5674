"""Telemetry of an engine: counts, times, spans and log records, and on request sampled statistics.

Counts and times cost microseconds per step and are always on. The Probe costs more and exists only on request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from penstock.core.freshness import Ages
from penstock.core.gate import Gate
from penstock.core.observers import ALL_UNSEEN, EVERY_STEP, Pushed, StepObserver, Stepped, Unseen
from penstock.core.sampling import Moment, Probe
from penstock.model.stats import Counters, Stale, TableReport
from penstock.rows.table_set import TableSet

log = logging.getLogger("penstock")

STAGES = ("read", "sum", "step", "save")
RECENT_STEPS = 1024  # window of the quantiles


@dataclass(frozen=True, kw_only=True)
class MetricsSnapshot:
    """The numbers of an engine, or of a job, at one moment between two frames. It can be pickled.

    counters : of the current or last run, and of frames outside runs
    commit : the last one: the bytes of its files, its global step, when it was written (None: unknown); None: no commit
    moments, hot : sampled; hot : (table, id, fraction of the table's rows), of each table
    absent, early : of rounds, by worker, steps without a frame, and frames before their turn; waited_s : for a turn
    ages : of frames, by what has them (``Freshness``)
    The others are those of Gate, EngineCore, Telemetry and the programs of the tables.
    """

    counters: Counters = field(default_factory=Counters)
    stale: Stale = field(default_factory=Stale)
    global_step: int = 0
    num_accumulated: int = 0
    num_required: int = 0
    late: Mapping[int, int] = field(default_factory=dict)
    absent: Mapping[str, int] = field(default_factory=dict)
    early: Mapping[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    last_rates: tuple[float, ...] = ()
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    contributor_norms: Mapping[str, float] = field(default_factory=dict)
    update_norms: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, TableReport]
    updated: Mapping[str, int] = field(default_factory=dict)
    num_steps: int = 0
    recent_s: Sequence[float] = ()
    stage_s: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    num_compiles: int = 0
    problems: Sequence[str] = ()
    ages: Mapping[str, Ages] = field(default_factory=dict)
    seconds: float = 0.0
    fraction: float | None = None
    num_skipped: int = 0
    of_service: Mapping[str, int] | None = None
    first_bad: Mapping[str, str] = field(default_factory=dict)
    commit: tuple[int, int, float | None] | None = None
    moments: Sequence[Moment] = ()
    hot: Sequence[tuple[str, int, float]] = ()


class Telemetry(StepObserver):
    """The counts and times of one engine.

    tables : of the engine

    stage_s : seconds of reading, summing (including validation), steps, and saving, since the last run began
    updated, num_steps : table → rows that the optimizer was applied to, and the number of steps, since then
    recent_s : seconds of the last steps of all runs; on an accelerator, of their dispatch
    counters, fraction, first_bad : of the current or last run; the fraction of its input that is read (None: unknown),
        and by reason the first dropped row
    num_skipped : frames of that run that were skipped, because the checkpoint already contains them
    of_service : of a service: returns its counts of producers and callers, as its status has them; None: not a service
    tracer : OpenTelemetry's tracer, or any object with its ``start_as_current_span``; None: no spans
    """

    def __init__(self, tables: TableSet) -> None:
        self._tables = tables
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.updated: Counter[str] = Counter()
        self.num_steps = 0
        self.recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.counters = Counters()
        self.fraction: Callable[[], float | None] = lambda: None
        self.first_bad: Mapping[str, str] = {}
        self.num_skipped = 0
        self.of_service: Callable[[], Mapping[str, int]] | None = None
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.probe: Probe | None = None
        self.tracer: Any = None
        self._step_span: AbstractContextManager[Any] | None = None

    def look_closer(self) -> None:
        """Create the probe, if there is none."""
        if self.probe is None:
            self.probe = Probe(self._tables)

    def norm_reports(self) -> dict[str, Any]:
        """Return the norms that a Report and metrics have of updates; nothing if none are sampled."""
        return {} if self.probe is None else {"update_norms": dict(self.probe.update_norms)}

    @contextmanager
    def run(
        self, counters: Counters, fraction: Callable[[], float | None], first_bad: Mapping[str, str]
    ) -> Iterator[None]:
        """Return a context for one run: reset the counts and times, and record its start and end."""
        self.counters, self.fraction, self.first_bad = counters, fraction, first_bad
        self.stage_s, self.num_steps = dict.fromkeys(STAGES, 0.0), 0
        self.updated, self.num_skipped = Counter(), 0
        self.started_s, self.ended_s = time.perf_counter(), None
        log.info("run began")
        message: tuple[Any, ...] = ("run ended",)
        try:
            with nullcontext() if self.tracer is None else self.tracer.start_as_current_span("penstock.run"):
                yield
        except GeneratorExit:  # the consumer has dropped its deltas
            raise
        except BaseException as error:
            message = "run ended by %s: %s", type(error).__name__, error
            raise
        finally:
            self._ended(*message)

    def _ended(self, message: str, *arguments: Any) -> None:
        self.ended_s = time.perf_counter()
        fraction = self.fraction()
        self.fraction = lambda: fraction  # a reference to the reader would keep its files mapped
        counted = {name: getattr(self.counters, name) for name in ("rows", "frames", "stale", "steps")}
        level = logging.WARNING if arguments else logging.INFO
        log.log(level, message, *arguments, extra={"penstock": counted | {"seconds": self.seconds}})

    @property
    def seconds(self) -> float:
        """Duration of the current or last run."""
        if self.started_s is None:
            return 0.0
        return (time.perf_counter() if self.ended_s is None else self.ended_s) - self.started_s

    def timed(self, stage: str) -> AbstractContextManager[Any]:
        """Return a context that counts its time as a stage: "sum" without the time of steps and saving."""
        return _Timed(self, stage)

    def most_unseen(self) -> Unseen:
        return ALL_UNSEEN if self.probe is None and self.tracer is None else EVERY_STEP

    def before_step(self, coalesced: Stepped) -> None:
        if self.probe is not None:
            self.probe.before(coalesced)
        if self.tracer is not None:
            self._step_span = self.tracer.start_as_current_span("penstock.step")
            self._step_span.__enter__()

    def pushed(self, pushed: Pushed) -> None:
        if not pushed.seconds:
            return
        if self._step_span is not None:
            self._end_span(None)
        self.num_steps += len(pushed.seconds)
        self.recent_s.extend(pushed.seconds)
        self.stage_s["step"] += sum(pushed.seconds)
        for name, parts in pushed.changed.items():
            for rows in parts:
                self.updated[name] = self.updated.get(name, 0) + rows.num_ids
        if self.probe is not None:
            self.probe.after()

    def core_failed(self, error: BaseException) -> None:
        """End the span of a failed step, which is not counted."""
        self._end_span(error)

    def _end_span(self, error: BaseException | None) -> None:
        span, self._step_span = self._step_span, None
        if span is not None:
            span.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def sample(self, pushed: Pushed, gate: Gate, rates: Sequence[float]) -> None:
        """Sample a frame of a run after it was admitted or dropped as stale."""
        if self.probe is not None:
            self.probe.sample_ids(pushed.frame)
            self.probe.note(self.seconds, self.counters, gate, rates)


class _Timed:
    """A context whose seconds count for a stage; for "sum" without those of steps and saving meanwhile."""

    __slots__ = ("_began_s", "_contains_others", "_stage", "_watch")

    def __init__(self, watch: Telemetry, stage: str) -> None:
        self._watch, self._stage, self._contains_others = watch, stage, stage == "sum"

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()
        if self._contains_others:
            stage_s = self._watch.stage_s
            self._began_s -= stage_s["step"] + stage_s["save"]

    def __exit__(self, *_: object) -> None:
        ended_s, stage_s = time.perf_counter(), self._watch.stage_s
        if self._contains_others:
            ended_s -= stage_s["step"] + stage_s["save"]
        stage_s[self._stage] += ended_s - self._began_s
