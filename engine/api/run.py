"""The run of one source: read, applied and committed frame by frame.

``Engine.run`` drives a ``SourceRun`` to its end; ``Engine.stage`` drives it lazily, as its consumer requests deltas.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import penstock.base.interrupts as interrupts
from penstock.api.deltas import Deltas
from penstock.api.planning.look_ahead import LookAhead, looked_ahead
from penstock.base.errors import UsageError, listed
from penstock.base.integrations import PROGRESS
from penstock.base.validation import INT64_MAX, fraction, function, is_uri, place, whole
from penstock.checkpoint.run_commits import RunCommits
from penstock.checkpoint.session import CheckpointSession
from penstock.core.engine_core import EngineCore
from penstock.core.frame_gate import FrameGate
from penstock.core.observers import Context, Pushed
from penstock.core.telemetry import Telemetry
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.delta_sink import DeltaWriter, open_deltas
from penstock.io.quarantine import parse_on_bad_row
from penstock.io.run_files import OpenDeltas
from penstock.model.command_options import StageOptions
from penstock.model.frames import FrameRun
from penstock.model.learning_rates import LearningRates
from penstock.model.options import AnyPath
from penstock.model.stats import Counters, Report
from penstock.model.workers import runs_in_rounds

if TYPE_CHECKING:
    from penstock.model.options import Progress

log = logging.getLogger("penstock")

Runs = Iterator[tuple[int, FrameRun]]


def shown_by(progress: Any) -> AbstractContextManager[Progress | None]:
    """Return a context that yields what to call with the progress. Raises UsageError, ModuleNotFoundError."""
    if not isinstance(progress, str):
        return nullcontext(progress if progress is None else function("progress", progress))
    if progress not in PROGRESS:
        raise UsageError(f"progress: expected something to call or one of {listed(PROGRESS)}, got {progress!r}")
    bar: AbstractContextManager[Progress] = import_module(PROGRESS[progress]).progress_bar()
    return bar


class SourceRun:
    """A source and the options of its run.

    gate : passed to ``progress``
    deltas : observes the core, and emits the deltas that are due after every frame
    target : where the deltas are written, before every commit; None: the consumer of ``batches`` takes them

    The constructor checks the options and that the source exists, and opens nothing. Raises InputError, ConfigError or
    UsageError.
    """

    def __init__(
        self,
        core: EngineCore,
        session: CheckpointSession,
        telemetry: Telemetry,
        gate: FrameGate,
        options: StageOptions,
        deltas: Deltas | None,
        target: AnyPath | None,
    ) -> None:
        core.check_ready()
        self._core, self._session, self._telemetry, self._gate = core, session, telemetry, gate
        self._options, self._counters, self._deltas = options, Counters(), deltas
        self._limit = None if options.limit is None else whole("limit", options.limit, 0)
        self._max_stale = None if options.max_stale is None else fraction("max_stale", options.max_stale)
        self._rates = LearningRates(core.config.num_tags, options.learning_rates, core.config.schedules)
        mode, self._quarantine = parse_on_bad_row(options.on_bad_row)
        merge = core.policy.merge(options.merge)
        read = ReadOptions.of_config(
            core.config, vars(options), on_bad_row=mode, rates_needed=self._rates.missing, unvalidated=True, merge=merge
        )
        self._reader = FrameReader(options.source, read)
        self._ahead = None
        if self._reader.is_ready and looked_ahead(core.tables.specs):
            self._ahead = LookAhead(core, self._reader, options.flush)
        self._first_bad = self._reader.first_bad if self._ahead is None else self._ahead.first_bad
        self._show_progress = shown_by(options.progress)
        self._progress: Progress | None = None
        self._context = Context(self._rates, self._counters, most=INT64_MAX if options.progress is None else 1)
        self._open_deltas: OpenDeltas | None = None
        if deltas is not None and target is not None:
            if not is_uri(target):
                place("deltas", target)
            self._open_deltas = lambda *committed: open_deltas(target, deltas.schema, core.changed_step, *committed)
        self._writer: DeltaWriter | None = None
        self._num_skipped = 0
        if core.turns is not None:
            core.turns.drop_bad_rows(mode != "error")
        self._absent = Counter[str]() if core.turns is None else core.turns.absent.copy()
        self._started_s = time.perf_counter()

    def run(self) -> Report:
        """Apply the source to its end."""
        with closing(self.batches()) as batches:
            for batch in batches:
                assert self._writer is not None
                self._writer.write(batch)
        return self._report()

    def reader(self) -> pa.RecordBatchReader:
        """Return a stream of deltas whose consumer drives the run."""
        assert self._deltas is not None
        return pa.RecordBatchReader.from_batches(self._deltas.schema, self.batches())

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """Apply frame by frame, and yield the deltas as they become due. Closing the generator ends the run there.

        A change may be committed only once its delta was yielded and the next batch requested: that request is the
        consumer's acknowledgement.
        """
        core, committing = self._core, self._telemetry.timed("save")
        with self._begun() as saving:
            try:
                with core.sharing_errors(), closing(self._pushes(saving)) as pushes:
                    for pushed in pushes:
                        try:
                            if self._deltas is not None:
                                yield from self._deltas.due()
                        finally:
                            if pushed.num_frames:
                                with committing:
                                    saving.advance()
                        if pushed.num_frames:
                            self._applied(pushed)
                if self._options.flush:
                    core.open_early(Context(core.rates, self._counters))
            except GeneratorExit:
                raise
            except BaseException:
                if self._deltas is not None and self._core.failure.reason is None:
                    yield from self._deltas.rest()
                raise
            # If both are files, no other thread steps between the last delta and its commit. No lock is held for a
            # consumer, which may take any time and continue from another thread.
            with core.gate.still() if self._writer is not None and saving.commits else nullcontext():
                if self._deltas is not None:
                    yield from self._deltas.rest()
                    if not self._deltas.fully_consumed:  # other threads stepped before the consumer's next request
                        yield from self._deltas.rest()
                saving.end()
        core.wait()
        for note in self._notes():
            log.warning(note)
        saving.positions.check_stale(self._max_stale)

    @contextmanager
    def _begun(self) -> Iterator[RunCommits]:
        """Begin to count the run, and open its commits and files."""
        self._started_s = time.perf_counter()
        self._core.start_counting()
        self._core.rates = self._rates
        with (
            self._show_progress as self._progress,
            self._telemetry.run(self._counters, self._fraction, self._first_bad),
            self._session.run(
                self._reader,
                self._counters,
                self._options,
                self._quarantine,
                self._may_commit,
                self._open_deltas,
            ) as saving,
        ):
            self._context.run, self._writer = saving, saving.files.deltas
            self._telemetry.num_skipped = self._num_skipped = saving.num_skipped
            yield saving

    def _pushes(self, saving: RunCommits) -> Generator[Pushed, None, None]:
        """Push the frames of the source that no commit has, and yield what happens."""
        core, context = self._core, self._context
        reading, summing = self._telemetry.timed("read"), self._telemetry.timed("sum")
        with closing(self._reader.numbered_runs()) as numbered, ExitStack() as stack:
            runs: Runs = core.rounds(self._limited(self._named(numbered), saving.remaining(self._limit)), context)
            with reading:
                saving.skip(((number, run.frame()) for number, run in runs), self._limit)
            if core.gate.is_due():  # a full table refused the step, when it had fewer rows
                with summing:
                    pushed = core.open_early(context)
                yield pushed
            if self._ahead is not None:
                runs = stack.enter_context(closing(self._ahead.runs(runs)))
            while True:
                with reading:
                    if (item := next(runs, None)) is None:
                        return
                context.source, run = item
                if run.is_void:
                    self._pass_over(run, saving)
                    continue
                with summing:
                    pushed = core.push(run, context)
                yield pushed.check()

    def _named(self, runs: Runs) -> Runs:
        """Return the frames; in rounds, those without a name have the worker of their source."""
        turns = self._core.turns
        if turns is None:
            return runs
        count = turns.names.count
        names = list(map(turns.names.name, range(count))) if len(self._reader.sources) == count else None
        return runs_in_rounds(runs, names)

    def _pass_over(self, run: FrameRun, saving: RunCommits) -> None:
        """Count a void frame, or commit during a pause."""
        if run.frame().position:
            saving.pass_over(self._context.source, run)
        elif self._reader.is_idle:
            saving.idle()

    def _limited(self, runs: Runs, most: int | None) -> Runs:
        """Yield the first frames, and the pauses between them: void frames without a position. most : None: all"""
        if most is None:
            yield from runs
            return
        at_once = self._context.most
        while most and (item := next(runs, None)) is not None:
            run, first = item[1], item[1].next
            self._context.most = min(most, at_once)
            yield item
            is_pause = run.is_void and not run.frame().position
            most -= 0 if is_pause else max(1, run.next - first)

    def _applied(self, pushed: Pushed) -> None:
        """Sample and report frames that were applied."""
        self._telemetry.sample(pushed, self._core.gate, self._core.last_rates or ())
        if self._progress is not None:
            self._progress(self._counters, self._gate, self._fraction())
        interrupts.check()

    def _fraction(self) -> float | None:
        """Return the fraction of the input that was applied, or is next, if known."""
        return self._reader.fraction() if self._ahead is None else self._ahead.fraction

    def _may_commit(self) -> bool:
        """Return whether every change was acknowledged: a run resumed from a commit never emits earlier changes."""
        return self._deltas is None or self._deltas.fully_consumed

    def _notes(self) -> tuple[str, ...]:
        """Return hints for the user about what was read, a sentence each."""
        turns = self._core.turns
        waits = [] if turns is None or not turns.num_pending else [turns.note()]
        return (*self._counters.notes(self._first_bad), *self._reader.notes(), *waits)

    def _report(self) -> Report:
        seconds, core, counters = time.perf_counter() - self._started_s, self._core, self._counters
        with core.gate.still():
            return counters.report(
                seconds,
                pending=core.num_pending,
                absent={} if core.turns is None else dict(core.turns.absent - self._absent),
                global_step=core.global_step,
                verified=self._reader.verified,
                unverified=self._reader.unverified,
                tables=core.table_reports(),
                learning_rates=core.last_rates if core.config.num_tags else None,
                notes=(*self._notes(), *core.tables.programs.problems, *core.tables.notes),
                skipped=self._num_skipped,
                variants=core.tables.programs.variants,
                device_problems=len(core.tables.programs.problems),
                **core.norm_reports(),
                **self._telemetry.norm_reports(),
            )
