"""One source on its way through an engine: read, applied and saved frame by frame.

``Engine.run`` drives a flow to its end, ``Engine.stage`` as far as somebody asks for deltas. Nothing is read before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

import penstock.interrupts as interrupts
from penstock.checkpoint.incremental import KEEP
from penstock.checkpoint.run_files import OpenDeltas
from penstock.checkpoint.run_session import Run
from penstock.deltas import Deltas
from penstock.gate import Gate
from penstock.io.decoding.reader import ReadOptions
from penstock.io.storage.delta_sink import DeltaWriter
from penstock.io.storage.quarantine import parse_on_bad_row
from penstock.learning_rates import Given, LearningRates
from penstock.stats import Counters, Report, TableReport
from penstock.validation import function, share, whole

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.engine import Engine

Progress = Callable[[Counters, Gate, float | None], None]


class FlowArguments(TypedDict, total=False):
    """How a source is read, applied and saved: what ``Engine.run`` and ``Engine.stage`` take beside the source.

    table : of rows that do not say theirs
    columns : role → name, where the stream's columns have other names
    contribution_rows : cut frames of that many rows, where batches mean nothing and there is no step
    merge : "step" merges sorted sources by step, "round" takes a frame of each source in turn
    learning_rates : by tag, a mapping or a sequence; before the column and the schedules
    on_bad_row : "error" (default) stops before the frame; "drop" leaves the row out and counts it; "quarantine=FILE"
        also puts it into an Arrow file, whole when the run returns or raises (docs/bad_rows.md)
    flush : open the gate once more at the end
    limit : stop after that many frames, those left out by ``resume`` included
    max_stale : 0 to 1, of the rows read, those that ``resume`` skips included: if stale frames held more, an InputError
        at the end, which undoes nothing: what was applied and committed, and the deltas, stay
    gradient_dtype : "bfloat16" where uint16 values are that
    allow_missing_end : take a stream whose producer wrote no end marker
    checkpoint : a folder in which to commit the state with its position: after every ``every`` steps, in the
        background, and at the end, whatever ended the run; the last ``keep`` commits stay
    resume : leave out the frames that this engine's state holds already (``Engine.restore``)
    progress : called after every frame with the counters, the gate and the share of input read
    """

    table: str | None
    columns: Mapping[str, str] | None
    contribution_rows: int | None
    merge: str | None
    learning_rates: Given
    on_bad_row: str
    flush: bool
    limit: int | None
    max_stale: float | None
    gradient_dtype: str | None
    allow_missing_end: bool
    checkpoint: str | os.PathLike[str] | None
    every: int | None
    keep: int
    resume: bool
    progress: Progress | None


class Flow:
    """A source and how it is to be applied: ``FlowArguments`` says what the arguments mean.

    deltas : watches what changes, and is asked for it after every frame

    Made, it has looked at its arguments and at whether the source exists, and opened nothing.
    Raises InputError, ConfigError or UsageError.
    """

    def __init__(
        self,
        engine: Engine,
        source: Any,
        *,
        table: str | None = None,
        columns: Mapping[str, str] | None = None,
        contribution_rows: int | None = None,
        merge: str | None = None,
        learning_rates: Given = None,
        on_bad_row: str = "error",
        flush: bool = False,
        limit: int | None = None,
        max_stale: float | None = None,
        gradient_dtype: str | None = None,
        allow_missing_end: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int = KEEP,
        resume: bool = False,
        progress: Progress | None = None,
        deltas: Deltas | None = None,
    ) -> None:
        engine._check_ready()
        self._engine, self._counters, self._deltas = engine, Counters(), deltas
        self._limit = None if limit is None else whole("limit", limit, 0)
        self._max_stale = None if max_stale is None else share("max_stale", max_stale)
        self._rates = LearningRates(engine.config.num_tags, learning_rates, engine.config.schedules)
        mode, self._quarantine = parse_on_bad_row(on_bad_row)
        options = ReadOptions(
            sizes=engine.config.sizes,
            features=engine.config.features,
            num_tags=engine.config.num_tags,
            rates_needed=self._rates.missing,
            table=table,
            columns=columns or {},
            contribution_rows=contribution_rows,
            merge=merge,
            on_bad_row=mode,
            gradient_dtype=gradient_dtype,
            allow_missing_end=allow_missing_end,
            unseen=True,
        )
        self._reader = engine._reader(source, options)
        self._progress = None if progress is None else function("progress", progress)
        self._flush = flush
        self._saving = (checkpoint, every, keep, resume, self._quarantine)
        self._open_deltas: OpenDeltas | None = None
        self._writer: DeltaWriter | None = None
        self._skipped = 0
        self._started_s = time.perf_counter()

    def run(self, open_deltas: OpenDeltas | None = None) -> Report:
        """To the end of the source. open_deltas : makes what takes the deltas; commits wait for it"""
        self._open_deltas = open_deltas
        with closing(self.batches()) as batches:
            for batch in batches:
                assert self._writer is not None
                self._writer.write(batch)
        return self._report()

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """Apply frame by frame, and hand out the deltas as they become due. Closed between two, it has ended there.

        What changed may be committed when it was handed out and more is asked for: before, nobody may have it.
        """
        engine, counters = self._engine, self._counters
        self._started_s = time.perf_counter()
        engine._start_counting()
        engine._rates = self._rates
        with (
            engine.watch.run(counters, self._reader.fraction, self._reader.first_bad),
            engine._saves.run(self._reader, counters, *self._saving, self._may_commit, self._open_deltas) as saving,
        ):
            self._writer = saving.files.deltas
            engine.watch.num_skipped = self._skipped = saving.skipped
            try:
                yield from self._applied(saving)
            except GeneratorExit:
                raise
            except BaseException as error:
                if self._deltas is not None and self._deltas.outlive(error):
                    yield from self._rest()
                raise
            with self._alone(saving):
                yield from self._rest()
                if not self._may_commit():  # others have stepped before more was asked for
                    yield from self._rest()
                saving.end()
        engine._wait()
        saving.check_stale(self._max_stale)

    def _alone(self, saving: Run) -> AbstractContextManager[Any]:
        """No other thread steps between the last delta and the commit that counts it, where both are files.

        Not where a consumer pulls the deltas: it may take any time for one, and pull the next from another thread.
        """
        return self._engine.gate.still() if self._writer is not None and saving.commits else nullcontext()

    def _applied(self, saving: Run) -> Iterator[pa.RecordBatch]:
        engine, counters, watch = self._engine, self._counters, self._engine.watch
        for frame in watch.reading(saving.frames(self._limit)):
            with watch.applying():
                frame, _ = engine._push(frame, self._rates, counters)
            try:
                yield from self._due()
            finally:
                with watch.saving():
                    saving.took(frame)
            watch.took(frame, engine.gate, engine._last_rates or ())
            if self._progress is not None:
                self._progress(counters, engine.gate, self._reader.fraction())
            interrupts.check()
        if self._flush:
            engine._flush(counters)

    def _due(self) -> Iterator[pa.RecordBatch]:
        return iter(()) if self._deltas is None else self._deltas.due()

    def _rest(self) -> Iterator[pa.RecordBatch]:
        """Of the interval that has begun."""
        if self._deltas is not None:
            yield from self._deltas.rest()

    def _may_commit(self) -> bool:
        """Not while there are changes that nobody was told of: a run that goes on from there would not tell them."""
        return self._deltas is None or self._deltas.is_clear

    def _report(self) -> Report:
        seconds, engine, counters = time.perf_counter() - self._started_s, self._engine, self._counters
        with engine.gate.still():
            tables = {n: TableReport(s.num_rows, s.num_distinct) for n, s in engine._pipeline.stores.items()}
            return counters.report(
                seconds,
                pending=engine.gate.num_accumulated,
                global_step=engine.global_step,
                verified=self._reader.verified,
                unverified=self._reader.unverified,
                tables=tables,
                learning_rates=engine._last_rates if engine.config.num_tags else None,
                notes=counters.notes(self._reader.first_bad),
                skipped=self._skipped,
            )
