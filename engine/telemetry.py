"""What an engine does while it runs: how often and how long, and on request a closer look at what flows.

Counting and timing is cheap enough to be always on (microseconds a step). What costs more is the
Probe's, which is there only where somebody looks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from penstock.core import StepObserver
from penstock.frames import Frame
from penstock.gate import Gate
from penstock.sampling import KnownAs, Probe, Read, Stepped
from penstock.stats import Counters

T = TypeVar("T")
log = logging.getLogger("penstock")
log.addHandler(logging.NullHandler())  # who sets nothing up hears nothing: without it Python prints warnings to stderr

STAGES = ("read", "sum", "step", "save")
RECENT_STEPS = 1024  # that quantiles are taken over


class Telemetry(StepObserver):
    """Counts and times of one engine.

    read : (table, ids) → their weights, for who is inside a step already
    known_as : (table, ids) → as whoever looks knows them
    stage_s : seconds in reading, summing (validation included), steps, and saving, since the last run began
    updated, num_steps : table → rows that the optimizer was applied to, and how many steps, since then
    recent_s : of the last steps of all runs. On an accelerator a step's time is that of its dispatch
    counters, share, first_bad : of the run that goes on or was the last; how much of its input is read (None: unknown),
        and by reason the first row that was left out
    num_skipped : frames of that run that were left out, because the checkpoint held them already
    queued_rows : of a service: how many wait in frames that are not whole yet; None where nothing is pushed
    tracer : OpenTelemetry's, or what has its ``start_as_current_span``; None: no spans
    """

    def __init__(
        self, read: Read, clock: Callable[[], float] = time.perf_counter, known_as: KnownAs = lambda _, ids: ids
    ) -> None:
        self._read, self.clock, self._known_as = read, clock, known_as
        self.stage_s = dict.fromkeys(STAGES, 0.0)
        self.updated: Counter[str] = Counter()
        self.num_steps = 0
        self.recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.counters = Counters()
        self.share: Callable[[], float | None] = lambda: None
        self.first_bad: Mapping[str, str] = {}
        self.num_skipped = 0
        self.queued_rows: Callable[[], int] | None = None
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.probe: Probe | None = None
        self.tracer: Any = None
        self._step_span: AbstractContextManager[Any] | None = None
        self._step_began_s = 0.0

    def look_closer(self) -> None:
        """From now on there is a probe."""
        if self.probe is None:
            self.probe = Probe(self._read, self.clock, self._known_as)

    @contextmanager
    def run(
        self, counters: Counters, share: Callable[[], float | None], first_bad: Mapping[str, str]
    ) -> Iterator[None]:
        """Around a run."""
        self.counters, self.share, self.first_bad = counters, share, first_bad
        self.stage_s, self.num_steps = dict.fromkeys(STAGES, 0.0), 0
        self.updated, self.num_skipped = Counter(), 0
        self.started_s, self.ended_s = self.clock(), None
        log.info("run began")
        try:
            with self._span("penstock.run"):
                yield
        except GeneratorExit:  # who pulled its deltas has let it go
            self._ended()
            raise
        except BaseException as error:
            self._ended("run ended by %s: %s", type(error).__name__, error)
            raise
        else:
            self._ended()

    def _ended(self, message: str = "run ended", *of: Any) -> None:
        self.ended_s = self.clock()
        share = self.share()
        self.share = lambda: share  # asking the reader for it would keep its files mapped
        told = {name: getattr(self.counters, name) for name in ("rows", "frames", "stale", "steps")}
        level = logging.WARNING if of else logging.INFO
        log.log(level, message, *of, extra={"penstock": told | {"seconds": self.seconds}})

    @property
    def seconds(self) -> float:
        """Of the run."""
        if self.started_s is None:
            return 0.0
        return (self.clock() if self.ended_s is None else self.ended_s) - self.started_s

    def reading(self, frames: Iterator[T]) -> Iterator[T]:
        """The same frames; what is waited for them is the stage "read"."""
        while True:
            started = self.clock()
            try:
                frame = next(frames)
            except StopIteration:
                return
            finally:
                self.stage_s["read"] += self.clock() - started
            yield frame

    def applying(self) -> AbstractContextManager[Any]:
        """A frame is taken in; what of it is neither step nor saving is the stage "sum"."""
        return _Timed(self, "sum", ("step", "save"))

    def saving(self) -> AbstractContextManager[Any]:
        return _Timed(self, "save")

    def before_step(self, coalesced: Stepped) -> None:
        if self.probe is not None:
            self.probe.before(coalesced)
        self._step_began_s = self.clock()
        if self.tracer is not None:
            self._step_span = self.tracer.start_as_current_span("penstock.step")
            self._step_span.__enter__()

    def after_step(self, coalesced: Stepped) -> None:
        self._end_span(None)
        seconds = self.clock() - self._step_began_s
        self.num_steps += 1
        self.recent_s.append(seconds)
        self.stage_s["step"] += seconds
        for name, several in coalesced.items():
            for rows in several:
                self.updated[name] += rows.num_ids
        if self.probe is not None:
            self.probe.after()

    def step_failed(self, error: BaseException) -> None:
        """A step that failed is not counted."""
        self._end_span(error)

    def _end_span(self, error: BaseException | None) -> None:
        span, self._step_span = self._step_span, None
        if span is not None:
            span.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def took(self, frame: Frame, gate: Gate, rates: Sequence[float]) -> None:
        """A frame of a run is in, or was stale."""
        if self.probe is not None:
            self.probe.took(frame)
            self.probe.note(self.seconds, self.counters, gate, rates)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        if self.tracer is None:
            yield
        else:
            with self.tracer.start_as_current_span(name):
                yield


class _Timed:
    """Seconds in here belong to a stage, but for those that ``others`` count meanwhile."""

    __slots__ = ("_others", "_outside_s", "_stage", "_started_s", "_watch")

    def __init__(self, watch: Telemetry, stage: str, others: tuple[str, ...] = ()) -> None:
        self._watch, self._stage, self._others = watch, stage, others

    def __enter__(self) -> None:
        self._outside_s = self._others_s()
        self._started_s = self._watch.clock()

    def __exit__(self, *_: object) -> None:
        seconds = self._watch.clock() - self._started_s
        self._watch.stage_s[self._stage] += seconds - (self._others_s() - self._outside_s)

    def _others_s(self) -> float:
        stage_s = self._watch.stage_s
        return sum([stage_s[other] for other in self._others])
