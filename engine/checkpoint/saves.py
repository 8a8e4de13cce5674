"""The saving side of an engine: what a run commits and when, and what it leaves out when it is resumed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arguments import whole
from penstock.checkpoint.contents import describe, encoded, tables_to_save
from penstock.checkpoint.folder import Commit, Folder
from penstock.checkpoint.positions import Positions
from penstock.checkpoint.saver import Saver
from penstock.errors import UsageError
from penstock.frames import Coalesced, Frame
from penstock.io.delta_file import DeltaWriter
from penstock.io.quarantine import QuarantineWriter
from penstock.io.reader import FrameReader
from penstock.stats import Counters

if TYPE_CHECKING:
    from penstock.engine import Engine

# Between two looks at whether copying has to go on without frames.
PAUSE_S = 0.01

Shield = Callable[[], AbstractContextManager[Any]]


class Saves:
    """What an engine keeps for its checkpoints.

    positions : how far the last run has come in its sources
    """

    parts: tuple[str, ...] = ("",)  # of the rows, whose files make up a commit

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver: Saver | None = None  # of the last folder: what has changed since
        self._before, self._running = Counters(), Counters()
        self._runs: list[Run] = []  # under way, in the order in which they began
        self.positions = Positions()
        self._quarantine: QuarantineWriter | None = None
        self._aside: Mapping[str, int] | None = None  # what the last quarantine committed
        self._deltas: DeltaWriter | None = None
        self.deltas_aside: Mapping[str, int] | None = None  # what the last file of deltas committed

    @property
    def totals(self) -> Counters:
        """Of all runs, also those before the checkpoint that this engine was made from."""
        return self._before.plus(self._running)

    @property
    def last(self) -> tuple[Commit, Path] | None:
        """The newest commit and the file whose age is its own, where there is one."""
        if self._saver is None or self._saver.last is None:
            return None
        return self._saver.last, self._saver.folder.manifest(self._saver.last.number)

    def take_up(
        self, folder: Folder, commit: Commit, positions: Positions, totals: Counters, aside: Mapping[str, int] | None
    ) -> None:
        """The engine is now what this commit says."""
        self.positions, self._before, self._aside = positions, totals, aside
        # Where the configuration is another one, what it makes of rows that no file holds is not known.
        same = commit.contents["config"] == encoded(self._engine.config) and commit.parts == self.parts
        self._saver = self._new_saver(folder, commit, same)

    @property
    def follows_steps(self) -> bool:
        """Whether ``before_step`` has anything to do."""
        return self._saver is not None

    def before_step(self, coalesced: Mapping[str, Sequence[Coalesced]]) -> None:
        """A step is about to change these rows. Under the gate's lock."""
        if self._saver is not None:
            self._saver.before_step(
                {name: [ids for rows in several for ids, _ in rows.parts] for name, several in coalesced.items()}
            )

    def before_any_change(self) -> None:
        """Something else is about to change the tables. Under the gate's lock."""
        if self._saver is not None:
            self._saver.before_any_change()

    def commit_aside(self) -> Mapping[str, int] | None:
        """The bad rows put aside so far are on disk, before the commit that says so."""
        if self._quarantine is not None:
            self._aside = self._quarantine.commit()
        return self._aside

    def commit_deltas(self) -> Mapping[str, int] | None:
        """The deltas of all that a commit holds are on disk before it."""
        if self._deltas is not None:
            self.deltas_aside = self._deltas.commit()
        return self.deltas_aside

    @contextmanager
    def beside(self, deltas: DeltaWriter | None) -> Iterator[None]:
        """Around a run: commits wait for what it writes."""
        if deltas is None:
            yield
            return
        self._deltas = deltas
        try:
            yield
        finally:
            self._deltas = None

    def known(self, counters: Counters, push: Callable[[], tuple[Frame, bool]]) -> tuple[Frame, bool]:
        """What ``push`` gives for a frame of the run with these counters, if there is one, which knows of it at once.

        Else a commit would hold frames that its position does not count.
        """
        for run in self._runs:
            if run.counters is counters:
                with self._engine.gate.still():
                    taken = push()
                    run.pushed(*taken)
                return taken
        return push()

    def speaks_of(self, run: Run | None) -> bool:
        """Whether commits say how far this run is, None: one that does not commit; else they do of another one."""
        return all(other is run or not other.commits for other in self._runs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit now, and wait for it."""
        saver = self._saver_of(Folder(path))
        saver.open()
        try:
            for run in self._runs:
                run.count()
            self._engine._state.wait()
            saver.commit()
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
        quarantine: Path | None = None,
        may_commit: Callable[[], bool] = lambda: True,
    ) -> Iterator[Run]:
        """Around a run: commits while it goes on, and at its end, whatever ends it. Arguments: ``FlowArguments``.

        may_commit : asked before each commit; what is not committed at the end is done again by who resumes
        """
        if checkpoint is None and every is not None:
            raise UsageError("every: says how often to commit; give checkpoint= too")
        every = None if every is None else whole("every", every, 1)
        met = Positions([source.name for source in reader.sources], reader.options.merge, checkpoint is not None)
        met.follow(self.positions)
        known = self.positions if resume else Positions()
        saver = None
        if checkpoint is not None:
            folder = Folder(checkpoint)
            folder.check_place(resume)
            with self._engine.gate.still():
                saver = self.opened(folder, keep)
        run: Run | None = None
        aside = self._aside if resume else None
        spoken_of = saver is not None or self.speaks_of(None)
        if spoken_of:
            self.count_into(counters)
            self._aside = aside
        try:
            with self._put_aside(quarantine, aside, spoken_of) as writer:
                with self._engine.gate.still():
                    run = Run(self, self._engine, saver, reader, known, met, every, writer, may_commit, counters)
                    self._runs.append(run)
                with self._ended(run, shield):
                    yield run
        finally:
            if run in self._runs:
                self._runs.remove(run)
            if saver is not None:
                with self._engine.gate.still():
                    saver.close()
            if run is not None:
                run.join()

    @contextmanager
    def _ended(self, run: Run, shield: Shield) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._may_commit(run, error):
                run.end(shield)
            raise
        else:
            run.end(shield)

    def _may_commit(self, run: Run, error: BaseException) -> bool:
        """What is whole is committed, but not after an error of the commit itself or of a step."""
        return not run.failed and self._engine._failed is None and run.may_commit()

    @contextmanager
    def _put_aside(
        self, path: Path | None, aside: Mapping[str, int] | None, spoken_of: bool
    ) -> Iterator[QuarantineWriter | None]:
        """The file of bad rows is whole and has its name when this ends, after the last commit."""
        writer = None if path is None else QuarantineWriter(path, aside)
        if spoken_of:
            self._quarantine = writer
        try:
            yield writer
        finally:
            if self._quarantine is writer:
                self._quarantine = None
            if writer is not None:
                writer.close()

    def opened(self, folder: Folder, keep: int) -> Saver:
        """The saver of a folder, which is locked until it is closed. Under the gate's lock."""
        saver, own = self._saver_of(folder), self._saver
        if own is not None and own is not saver:
            raise UsageError(f"{folder.path}: this engine commits to {own.folder.path} at this moment")
        if folder.numbers() and saver.last is None:
            raise UsageError(f"{folder.path}: this engine was not made from it; Engine.restore it, then run")
        saver.open(whole("keep", keep, 1))
        saver.in_use = True
        return saver

    def count_into(self, counters: Counters) -> None:
        """From here on these counters are what a commit adds to those before."""
        self._before, self._running = self.totals, counters

    def _saver_of(self, folder: Folder) -> Saver:
        """The saver of the last folder where it is this one, else a new one, which takes its place.

        But not where a run commits with the last one, which must hear of every step: then for one commit alone.
        """
        if self._saver is not None and self._saver.is_for(folder):
            return self._saver
        saver = self._new_saver(folder, None, False)
        if self._saver is None or not self._saver.in_use:
            self._saver = saver
        return saver

    def _new_saver(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        return Saver(folder, tables_to_save(self._engine), lambda: describe(self._engine), last, delta)


class Run:
    """One run's side of it.

    skipped : frames that were left out
    failed : a commit or a bad row could not be written; there is no use in trying again
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
        quarantine: QuarantineWriter | None,
        may_commit: Callable[[], bool],
        counters: Counters,
    ) -> None:
        self._saves, self._engine, self._saver, self._reader = saves, engine, saver, reader
        self.counters = counters
        self._quarantine, self.may_commit = quarantine, may_commit
        self._known, self._met, self._every = known, met, every
        self.check_stale = met.check_stale
        self._source: int | None = None  # of the last frame
        self._pushed: tuple[Frame, bool] | None = None  # has entered, or was stale, and no position counts it yet
        self._step = engine.global_step  # of the last commit begun
        self._news = saver is not None and saver.last is None  # something that no commit has
        self._pace: threading.Thread | None = None
        self._pacing = False
        self._num_frames = 0
        self._error: BaseException | None = None  # what the pace met
        self.skipped = known.num_frames
        self.failed = False
        if not known.num_frames and saves.speaks_of(self):
            saves.positions = met

    @property
    def commits(self) -> bool:
        return self._saver is not None

    def frames(self, limit: int | None) -> Iterator[Frame]:
        """The frames that are to be applied. limit : of all, those left out included"""
        if limit is not None and limit < self.skipped:
            raise UsageError(f"limit: the checkpoint holds {self.skipped} frames already, which is more than {limit}")
        with closing(self._reader.numbered()) as numbered:
            # Bad rows of what is left out have been told before.
            forget = self._reader.first_bad.clear
            for number, frame in self._known.rest(islice(numbered, limit), self._met, forget):
                self._source = number
                yield frame

    def took(self, frame: Frame) -> None:
        """The frame has been applied, or was stale, and is done with: commit where it is time, and copy a bit."""
        try:
            with self._engine.gate.still():
                self.count()
                if self._saver is None:
                    return
                self._raise()
                due = self._every is not None and self._engine.global_step - self._step >= self._every
                if due and self._saver.may_begin and self.may_commit():
                    self._begin()
                    self._start_pace()
                self._saver.advance()
        except BaseException:
            self.failed = True
            raise

    def pushed(self, frame: Frame, admitted: bool) -> None:
        """Under the gate's lock, in which it entered, or was found stale."""
        self._pushed = frame, admitted

    def count(self) -> None:
        """The position counts what has entered: who saves before ``took`` saves both. Under the gate's lock."""
        if self._pushed is None:
            return
        assert self._source is not None
        frame, admitted = self._pushed
        try:
            if self._quarantine is not None:
                self._quarantine.append(frame.bad_rows)
            self._met.took(self._source, frame, admitted)
        except BaseException:
            self.failed = True  # no position counts a frame that was applied: nothing is committed any more
            raise
        self._pushed, self._news = None, True
        self._num_frames += 1
        if self._saves.speaks_of(self):
            self._saves.positions = self._met

    def end(self, shield: Shield) -> None:
        """Everything that was taken is on disk."""
        if self._saver is None:
            return
        with shield(), self._engine.gate.still():
            self._raise()
            if self._news or self._engine.global_step != self._step:
                self._engine._state.wait()
                self._begin()
            self._saver.finish()

    def join(self) -> None:
        """No thread of this run is left. The saver is closed."""
        if self._pace is not None:
            self._pace.join()

    def _start_pace(self) -> None:
        """Copying goes on where no frame comes in for a while, too."""
        if self._pacing:
            return
        self._pacing = True
        self._pace = threading.Thread(target=self._keep_pace, name="penstock-pace", daemon=True)
        self._pace.start()

    def _keep_pace(self) -> None:
        assert self._saver is not None
        while True:
            seen = self._num_frames
            time.sleep(PAUSE_S)
            with self._engine.gate.still():
                if not self._saver.is_busy:
                    self._pacing = False
                    return
                if self._num_frames != seen:
                    continue
                try:
                    self._saver.advance(idle=True)
                except BaseException as error:
                    self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        assert self._saver is not None
        self._saver.begin()
        self._step, self._news = self._engine.global_step, False
