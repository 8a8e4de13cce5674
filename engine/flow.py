"""One source on its way through an engine: read, applied and saved frame by frame.

``Engine.run`` drives a flow to its end; what wants something between two frames asks for one frame at a time. Nothing
is read before somebody asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict

from penstock.arguments import whole
from penstock.checkpoint.saver import KEEP
from penstock.frames import Frame
from penstock.gate import Gate
from penstock.io.quarantine import parse_on_bad_row
from penstock.io.reader import ReadOptions
from penstock.rates import Given, LearningRates
from penstock.stats import Counters, Report, TableReport

if TYPE_CHECKING:
    from penstock.engine import Engine

Progress = Callable[[Counters, Gate, float | None], None]
Shield = Callable[[], AbstractContextManager[Any]]


class FlowArguments(TypedDict, total=False):
    """How a source is read, applied and saved: what ``Engine.run`` takes beside the source.

    table : of rows that do not say theirs
    columns : role → name, where the stream's columns have other names
    contribution_rows : cut frames of that many rows, where batches mean nothing and there is no step
    merge : "step" merges sorted sources by step, "round" takes a frame of each source in turn
    learning_rates : by tag, a mapping or a sequence; before the column and the schedules
    on_bad_row : "error" (default) stops before the frame; "drop" leaves the row out and counts it; "quarantine=FILE"
        also puts it into an Arrow file, whole when the run returns or raises (docs/bad_rows.md)
    flush : open the gate once more at the end
    limit : stop after that many frames, those left out by ``resume`` included
    gradient_dtype : "bfloat16" where uint16 values are that
    allow_missing_end : take a stream whose producer wrote no end marker
    checkpoint : a folder in which to commit the state with its position: after every ``every`` steps, in the
        background, and at the end, whatever ended the run; the last ``keep`` commits stay
    resume : leave out the frames that this engine's state holds already (``Engine.restore``)
    progress : called after every frame with the counters, the gate and the share of input read
    shield : a context manager held while a frame is applied (the command line holds signals back)
    """

    table: str | None
    columns: Mapping[str, str] | None
    contribution_rows: int | None
    merge: str | None
    learning_rates: Given
    on_bad_row: str
    flush: bool
    limit: int | None
    gradient_dtype: str | None
    allow_missing_end: bool
    checkpoint: str | os.PathLike[str] | None
    every: int | None
    keep: int
    resume: bool
    progress: Progress | None
    shield: Shield


class Flow:
    """A source and how it is to be applied: ``FlowArguments`` says what the arguments mean.

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
        gradient_dtype: str | None = None,
        allow_missing_end: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int = KEEP,
        resume: bool = False,
        progress: Progress | None = None,
        shield: Shield = nullcontext,
    ) -> None:
        engine._check_ready()
        self._engine, self._counters = engine, Counters()
        self._limit = None if limit is None else whole("limit", limit, 0)
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
        self._flush, self._progress, self._shield = flush, progress, shield
        self._saving = (checkpoint, every, keep, resume, self._quarantine)
        self._skipped = 0
        self._started_s = time.perf_counter()

    def run(self) -> Report:
        """To the end of the source."""
        for _ in self.frames():
            pass
        return self._report()

    def frames(self) -> Generator[Frame, None, None]:
        """Apply frame by frame, and hand out each as it was taken in. Closed between two, it has ended there."""
        engine, counters, shield = self._engine, self._counters, self._shield
        self._started_s = time.perf_counter()
        engine._start_counting()
        engine._rates = self._rates
        with engine._saves.run(self._reader, counters, shield, *self._saving) as saving:
            for frame in saving.frames(self._limit):
                with shield():
                    frame, _ = engine._push(frame, self._rates, counters)
                    saving.took(frame)
                if self._progress is not None:
                    self._progress(counters, engine.gate, self._reader.fraction())
                yield frame
            if self._flush:
                with shield():
                    engine._flush(counters)
        engine._wait()
        self._skipped = saving.skipped

    def _report(self) -> Report:
        seconds, engine, counters = time.perf_counter() - self._started_s, self._engine, self._counters
        with engine.gate.still():
            tables = {n: TableReport(s.num_rows, s.num_distinct) for n, s in engine._pipeline.stores.items()}
            return counters.report(
                seconds,
                pending=engine.gate.num_accumulated,
                global_step=engine.global_step,
                verified=self._reader.verified,
                tables=tables,
                learning_rates=engine._last_rates if engine.config.num_tags else None,
                notes=counters.notes(self._reader.first_bad),
                skipped=self._skipped,
            )
