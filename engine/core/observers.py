"""What frames are pushed with, what has happened to them, and who observes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.base.errors import PenstockError
from penstock.base.validation import INT64_MAX
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Coalesced, Frame, FrameRun, Int64
from penstock.model.learning_rates import LearningRates
from penstock.model.stats import Counters
from penstock.pyx.frame_steps import FrameSteps

Stepped = Mapping[str, Sequence[Coalesced]]


class Unseen(NamedTuple):
    """How many steps, and changes of rows, may come before an observer has to see a step begin."""

    steps: int = INT64_MAX
    changes: int = INT64_MAX


ALL_UNSEEN, EVERY_STEP = Unseen(), Unseen(0)


@dataclass(eq=False)  # not frozen: as Frame
class Context:
    """What frames are pushed with.

    rates : of their steps; counters : of their run, or of those outside runs
    source : the number of their source in the run; run : what counts them in the run's positions; None: nothing does
    most : frames that may enter together
    """

    rates: LearningRates
    counters: Counters
    source: int = 0
    run: Any = None
    most: int = INT64_MAX


@dataclass(eq=False)
class Pushed:
    """What has happened: frames of a run have entered the gate, and have opened it so often; or a frame was stale.

    run, first, stop : the frames, by their numbers in a run; without dropped rows. None: the gate was opened early, or
        was full before
    is_stale : of the only frame
    seconds : of each step
    changed : for observers: by table, what has the ids of the rows that the steps have changed
    full : why the gate could not open: no frame can enter before it does; None: nothing prevents it
    """

    run: FrameRun
    first: int
    stop: int
    context: Context
    is_stale: bool = False
    seconds: Sequence[float] = ()
    changed: Mapping[str, Sequence[Coalesced | FrameSteps]] = field(default_factory=dict)
    full: PenstockError | None = None

    @property
    def num_frames(self) -> int:
        return self.stop - self.first

    @property
    def num_rows(self) -> int:
        return int(self.run.bounds[self.stop] - self.run.bounds[self.first])

    @property
    def frame(self) -> Frame:
        """The first of the frames."""
        return self.run.frame_at(self.first)

    def check(self) -> Pushed:
        """Raise the error that keeps the gate from opening."""
        if self.full is not None:
            raise self.full
        return self


class StepObserver:
    """Receives a notification of everything that changes a core's tables. Every method runs under the gate's lock.

    An error raised here after a frame has begun to enter fails the engine, as an error of the step does.
    """

    needs_all_rows = False  # that a step changes, not only those of this process's frames

    def most_unseen(self) -> Unseen:
        """Return how many steps may come without ``before_step``, in native code."""
        return EVERY_STEP

    def before_step(self, coalesced: Stepped) -> None:
        """Prepare for a step that changes these rows, and all rows of tables whose optimizer is not lazy."""

    def pushed(self, pushed: Pushed) -> None:
        """Handle what has happened: completed steps, and frames, which positions count from now on."""

    def core_failed(self, error: BaseException) -> None:
        """Handle an error after which the core refuses further steps: one of them has failed half way."""

    def before_load(self) -> None:
        """Prepare for a load, which may set any rows."""

    def thawed(self, specs: Sequence[TableSpec]) -> None:
        """Handle tables that are trained from this step on, after ``before_load``: their rows have slots now."""

    def load_refused(self) -> None:
        """Handle a load that had no room, and has changed nothing."""

    def loaded(self, name: str, ids: Int64 | None) -> None:
        """Handle a load that has set rows of a table. ids : int64, shape (n,); None: all rows"""
