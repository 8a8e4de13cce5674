"""The checkpoints of an engine: what its runs commit, to which folder, and where they resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.engine_state import describe, encoded, tables_to_save
from penstock.checkpoint.incremental import KEEP, Contents, Saver
from penstock.checkpoint.run_files import CountedFiles, OpenDeltas, RunFiles
from penstock.checkpoint.run_session import Run
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder
from penstock.core import EngineCore, StepObserver
from penstock.errors import UsageError
from penstock.filesystem.descriptors import reserve
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader
from penstock.stats import Counters
from penstock.validation import whole


class CheckpointSession(StepObserver):
    """The checkpoint state of an engine: its saver, its runs in progress and their positions.

    timed : context manager around work that a step has to wait for
    positions : of the last run in its sources
    """

    parts: tuple[str, ...] = ("",)  # the parts of the rows; each has its files in a commit

    def __init__(self, core: EngineCore, timed: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._core, self._timed = core, timed
        self._saver: Saver | None = None  # of the last folder; tracks the dirty rows
        # For each other folder: the digests of its last commit that the state descends from.
        self._descends: dict[Path, tuple[str, ...]] = {}
        self._before, self._running = Counters(), Counters()
        self._runs: list[Run] = []  # in progress, in the order in which they began
        self.positions = Positions()
        self.files = CountedFiles(core.gate.still)

    @property
    def totals(self) -> Counters:
        """Return the counters of all runs, with those before the checkpoint that this engine was restored from."""
        return self._before.plus(self._running)

    @property
    def last(self) -> tuple[Commit, Path] | None:
        """Return the newest commit and its manifest file, whose age is that of the commit; None if there is none."""
        if self._saver is None or self._saver.last is None:
            return None
        return self._saver.last, self._saver.folder.manifest(self._saver.last.number)

    def resume_from(self, folder: Folder, commit: Commit, positions: Positions, totals: Counters) -> None:
        """Continue from a commit that the engine's state was restored from."""
        self.positions, self._before = positions, totals
        self.files.bad_rows, self.files.deltas = commit.contents.get("quarantine"), commit.contents.get("deltas")
        # Another configuration may initialize rows that no file contains differently: the next commit is then a base.
        same = commit.contents["config"] == encoded(self._core.config) and commit.parts == self.parts
        self._saver = self._new_saver(folder, commit, same)

    def frame_applied(self, frame: Frame, admitted: bool, counters: Counters) -> None:
        """Notify the run with these counters, if any: else a commit could contain frames that its position omits."""
        for run in self._runs:
            if run.counters is counters:
                with self._timed():
                    run.count(frame, admitted)
                if self._stores(run):
                    self.positions = run.positions
                return

    # ---- commits

    def _stores(self, run: Run | None) -> bool:
        """Return whether commits store the position of this run, and not of another one. None: a run without commits"""
        return all(other is run or not other.commits for other in self._runs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit the current state to a folder, and wait until it is durable."""
        saver = self._saver_of(Folder(path))
        saver.open()
        try:
            self.positions.check_counted()
            for run in self._runs:
                run.positions.check_counted()  # an interrupt of the run's thread is not one of this thread
                run.check()
            self._core.tables.wait()
            saver.commit()
        finally:
            saver.close()
            if saver is not self._saver:
                self._remember(saver)

    def commits(self, folder: Folder, every: int | None, resume: bool, listener: CommitListener) -> CommitSession:
        """Open the commits of a service to a folder. every : steps between two commits; None: only on request"""
        saver = self._opened(folder, KEEP, resume)
        return CommitSession(self._core, saver, every, listener, lambda: reserve.open(self._core.tables.prepare_thread))

    @contextmanager
    def run(
        self,
        reader: FrameReader,
        counters: Counters,
        checkpoint: str | os.PathLike[str] | None,
        every: int | None,
        keep: int,
        resume: bool,
        quarantine: Path | None = None,
        may_commit: Callable[[], bool] = lambda: True,
        open_deltas: OpenDeltas | None = None,
    ) -> Iterator[Run]:
        """Open a run, which ends with ``Run.end``. If an error ends it, commit the state if it is consistent.

        checkpoint, every, keep, resume : as for ``Engine.run``
        quarantine : the file of bad rows
        may_commit : called before each commit; a resumed run repeats the frames that were not committed
        open_deltas : creates the file of deltas, after the checkpoint's folder is locked
        """
        if checkpoint is None and every is not None:
            raise UsageError("every: sets how often to commit; give checkpoint= too")
        every = None if every is None else whole("every", every, 1)
        positions = Positions([source.name for source in reader.sources], reader.options.merge, checkpoint is not None)
        positions.follow(self.positions)
        start = self.positions if resume else Positions()
        start.seek(reader, positions)
        saver = None if checkpoint is None else self._opened(Folder(checkpoint), keep, resume)
        stores = saver is not None or self._stores(None)
        if stores:
            self.count_into(counters)
        run: Run | None = None
        try:
            has_committed = None if saver is None else saver.has_committed
            with self.files.opened(self._quarantine(quarantine), open_deltas, resume, stores, has_committed) as files:
                has_new = saver is not None and self._any_new(files)
                with self._core.gate.still():
                    run = Run(self._core, saver, reader, counters, start, positions, every, files, has_new, may_commit)
                    self._runs.append(run)
                    if not start.num_frames and self._stores(run):
                        self.positions = positions
                try:
                    yield run
                except BaseException as error:
                    if self._may_commit(run, error):
                        run.end(completed=False)
                    raise
                finally:
                    self._runs.remove(run)
        finally:
            if run is not None:
                run.close()
            elif saver is not None:
                with self._core.gate.still():
                    saver.close()

    def _quarantine(self, path: Path | None) -> Path | None:
        """Return the file of bad rows that this process writes."""
        return path

    def _any_new(self, files: RunFiles) -> bool:
        """Return whether the run writes a file that no commit refers to yet."""
        return files.any_new

    def _may_commit(self, run: Run, error: BaseException) -> bool:
        """Return whether the state is consistent after an error: neither a commit nor a step has failed."""
        return not run.failed and self._core.failed is None

    def _opened(self, folder: Folder, keep: int, resume: bool) -> Saver:
        """Open the saver of a folder, which locks the folder until it is closed.

        Raises UsageError if the engine commits to another folder, or the folder holds commits of another engine.
        """
        folder.check_place(resume)
        with self._core.gate.still():
            saver, own = self._saver_of(folder), self._saver
            if own is not None and own is not saver:
                raise UsageError(f"{folder.path}: this engine commits to {own.folder.path} at this moment")
            if saver.last is None and (numbers := folder.numbers()):
                raise UsageError(
                    f"{folder.path}: holds commit {numbers[-1]}, which this engine neither wrote nor was restored "
                    "from; Engine.restore it, then run"
                )
            saver.open(whole("keep", keep, 1))
            saver.in_use = True
            return saver

    def count_into(self, counters: Counters) -> None:
        """Count into these counters from now on: the totals are those so far plus these."""
        self._before, self._running = self.totals, counters

    def _saver_of(self, folder: Folder) -> Saver:
        """Return the saver of the last folder if it is this one, else a new saver, which replaces it.

        If a run commits with the last saver, it must observe every step: then the new one is for a single commit.
        """
        if self._saver is not None and self._saver.is_for(folder):
            return self._saver
        descends = self._descends.get(folder.path.resolve())
        last = folder.newest() if descends else None
        if last is not None and last.digests != descends:
            last = None  # a commit of another engine
        # The dirty rows since then are unknown: the next commit is a base.
        saver = self._new_saver(folder, last, False)
        if self._saver is None or not self._saver.in_use:
            if self._saver is not None:
                self._remember(self._saver)
            self._saver = saver
        return saver

    def _remember(self, saver: Saver) -> None:
        """Record the last commit of a replaced saver: a run may resume there until another writer commits."""
        if saver.last is not None:
            self._descends[saver.folder.path.resolve()] = saver.last.digests

    def _new_saver(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        saver = self._make_saver(folder, last, delta)
        self._core.observe(saver)
        return saver

    def _make_saver(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        return Saver(folder, tables_to_save(self._core), self._described, last, delta, self._timed)

    def _described(self) -> Contents:
        return describe(self._core, self.positions, self.files.commit(), self.totals)
