"""The saving side of an engine: what a run commits and when, and what it leaves out when it is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import whole
from penstock.checkpoint.contents import describe, encoded, tables_to_save
from penstock.checkpoint.folder import Commit, Folder
from penstock.checkpoint.positions import Positions
from penstock.checkpoint.saver import KEEP, Saver
from penstock.errors import UsageError
from penstock.frames import Coalesced, Frame
from penstock.io.reader import FrameReader
from penstock.stats import Counters

if TYPE_CHECKING:
    from penstock.engine import Engine

Shield = Callable[[], AbstractContextManager[Any]]


class Saves:
    """What an engine keeps for its checkpoints.

    positions : how far the last run has come in its sources
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver: Saver | None = None
        self._equal_to: tuple[Path, Commit] | None = None  # the tables are those of this commit
        self._before, self._running = Counters(), Counters()
        self.positions = Positions()

    @property
    def totals(self) -> Counters:
        """Of all runs, also those before the checkpoint that this engine was made from."""
        return self._before.plus(self._running)

    def take_up(self, folder: Folder, commit: Commit, positions: Positions, totals: Counters) -> None:
        """The engine is now what this commit says."""
        self.positions, self._before = positions, totals
        # Where the configuration is another one, what this one makes of a delta is not known: start with a base.
        if commit.contents["config"] == encoded(self._engine.config):
            self._equal_to = folder.path.resolve(), commit

    def before_step(self, coalesced: Mapping[str, Sequence[Coalesced]]) -> None:
        """A step is about to change these rows. Under the gate's lock."""
        self._equal_to = None
        if self._saver is not None:
            self._saver.before_step({name: [rows.ids for rows in several] for name, several in coalesced.items()})

    def before_any_change(self) -> None:
        """Something else is about to change the tables. Under the gate's lock."""
        self._equal_to = None
        if self._saver is not None:
            self._saver.before_any_change()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit now, and wait for it."""
        saver = self._saver_of(path, KEEP)
        try:
            self._engine._state.wait()
            self._equal_to = Path(path).resolve(), saver.commit()
        finally:
            saver.close()

    @contextmanager
    def run(
        self,
        reader: FrameReader,
        counters: Counters,
        shield: Shield,
        checkpoint: str | os.PathLike[str] | None,
        every: int | None,
        keep: int,
        resume: bool,
    ) -> Iterator[Run]:
        """Around a run: commits while it goes on, and at its end, whatever ends it. Arguments: ``Engine.run``."""
        if checkpoint is None and every is not None:
            raise UsageError("every: says how often to commit; give checkpoint= too")
        every = None if every is None else whole("every", every, 1)
        met = Positions([source.name for source in reader.sources], reader.options.merge, checkpoint is not None)
        known = self.positions if resume else Positions()
        if checkpoint is not None:
            self._check_place(Folder(checkpoint), resume)
            with self._engine.gate.still():
                self._saver = self._saver_of(checkpoint, whole("keep", keep, 1))
        self._before, self._running = self.totals, counters
        run = Run(self, self._engine, self._saver, reader, known, met, every)
        try:
            yield run
        except BaseException:
            # What is whole is committed, but not after an error of the commit itself or of a step.
            if not run.failed and self._engine._failed is None:
                with shield():
                    self._end(run)
            raise
        else:
            with shield():
                self._end(run)
        finally:
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def _end(self, run: Run) -> None:
        if self._saver is not None:
            with self._engine.gate.still():
                self._engine._state.wait()
                run.end()
                if self._saver.last is not None:
                    self._equal_to = self._saver.folder.resolve(), self._saver.last

    def _check_place(self, folder: Folder, resume: bool) -> None:
        folder.check_place(resume)
        if folder.numbers() and (self._equal_to is None or not self._equal_to[0].samefile(folder.path)):
            raise UsageError(f"{folder.path}: is not what this engine was made from; Engine.restore it, then run")

    def _saver_of(self, path: str | os.PathLike[str], keep: int) -> Saver:
        folder, since = Folder(path), None
        if self._equal_to is not None and folder.path.is_dir() and self._equal_to[0].samefile(folder.path):
            since = self._equal_to[1]
        return Saver(folder, tables_to_save(self._engine), lambda: describe(self._engine), keep, since)


class Run:
    """One run's side of it.

    skipped : frames that were left out
    failed : a commit could not be written; there is no use in trying again
    """

    def __init__(
        self,
        saves: Saves,
        engine: Engine,
        saver: Saver | None,
        reader: FrameReader,
        known: Positions,
        met: Positions,
        every: int | None,
    ) -> None:
        self._saves, self._engine, self._saver, self._reader = saves, engine, saver, reader
        self._known, self._met, self._every = known, met, every
        self._source = 0
        self._step = engine.global_step  # of the last commit begun
        self._news = saver is not None and saver.last is None  # something that no commit has
        self.skipped = known.num_frames
        self.failed = False
        if not known.num_frames:
            saves.positions = met

    def frames(self, limit: int | None) -> Iterator[Frame]:
        """The frames that are to be applied. limit : of all, those left out included"""
        if limit is not None and limit < self.skipped:
            raise UsageError(f"limit: the checkpoint holds {self.skipped} frames already, which is more than {limit}")
        with closing(self._reader.numbered()) as numbered:
            for number, frame in self._known.rest(islice(numbered, limit), self._met):
                self._source = number
                yield frame

    def took(self, frame: Frame) -> None:
        """The frame has been applied, or was stale: commit where it is time, and copy a bit."""
        self._met.took(self._source, frame)
        self._saves.positions, self._news = self._met, True
        if self._saver is None:
            return
        try:
            with self._engine.gate.still():
                due = self._every is not None and self._engine.global_step - self._step >= self._every
                if due and not self._saver.is_busy:
                    self._begin()
                self._saver.advance()
        except BaseException:
            self.failed = True
            raise

    def end(self) -> None:
        """Everything that was taken is on disk."""
        assert self._saver is not None
        if self._news or self._engine.global_step != self._step:
            self._begin()
        self._saver.finish()

    def _begin(self) -> None:
        assert self._saver is not None
        self._saver.begin()
        self._step, self._news = self._engine.global_step, False
