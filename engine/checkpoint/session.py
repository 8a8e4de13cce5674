"""The saving side of an engine: what a run commits and when, and what it leaves out when it is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.engine_state import describe, encoded, tables_to_save
from penstock.checkpoint.incremental import KEEP, Contents, Saver
from penstock.checkpoint.run_files import CountedFiles, OpenDeltas, RunFiles
from penstock.checkpoint.run_session import Run
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder
from penstock.core import EngineCore, StepObserver, Stepped
from penstock.errors import UsageError
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader
from penstock.io.storage.descriptors import reserve
from penstock.stats import Counters
from penstock.validation import whole


class Saves(StepObserver):
    """What an engine keeps for its checkpoints.

    timed : around the work that a step has to wait for
    positions : how far the last run has come in its sources
    """

    parts: tuple[str, ...] = ("",)  # of the rows, whose files make up a commit

    def __init__(self, core: EngineCore, timed: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._core, self._timed = core, timed
        self._saver: Saver | None = None  # of the last folder: what has changed since
        # Of the other folders: the digests of the last commit there that the state descends from.
        self._descends: dict[Path, tuple[str, ...]] = {}
        self._before, self._running = Counters(), Counters()
        self._runs: list[Run] = []  # under way, in the order in which they began
        self.positions = Positions()
        self.files = CountedFiles()

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

    def take_up(self, folder: Folder, commit: Commit, positions: Positions, totals: Counters) -> None:
        """The engine is now what this commit says."""
        self.positions, self._before = positions, totals
        self.files.bad_rows, self.files.deltas = commit.contents.get("quarantine"), commit.contents.get("deltas")
        # Where the configuration is another one, what it makes of rows that no file holds is not known.
        same = commit.contents["config"] == encoded(self._core.config) and commit.parts == self.parts
        self._saver = self._new_saver(folder, commit, same)

    # ---- StepObserver

    def before_step(self, coalesced: Stepped) -> None:
        """Copy the rows that the commit in flight still needs as they were."""
        if self._saver is not None:
            with self._timed():
                self._saver.before_step(
                    {name: [ids for rows in several for ids, _ in rows.parts] for name, several in coalesced.items()}
                )

    def before_load(self) -> None:
        if self._saver is not None:
            self._saver.before_any_change()

    def frame_applied(self, frame: Frame, admitted: bool, counters: Counters) -> None:
        """Notify the run of these counters, if there is one: else a commit would hold frames its position omits."""
        for run in self._runs:
            if run.counters is counters:
                run.pushed(frame, admitted)
                return

    # ---- commits

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
            self._core.tables.wait()
            saver.commit()
        finally:
            saver.close()
            if saver is not self._saver:
                self._remember(saver)

    def commits(self, folder: Folder, every: int | None, resume: bool, listener: CommitListener) -> CommitSession:
        """The commits of a service to a folder. every : steps between two; None: only on request"""
        folder.check_place(resume)
        with self._core.gate.still():
            saver = self.opened(folder, KEEP)
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
        """Around a run, which ends with ``Run.end``; where an error ends it, what is whole is committed all the same.

        Arguments: ``FlowArguments``.
        may_commit : asked before each commit; what is not committed at the end is done again by who resumes
        open_deltas : makes the file of deltas, once the checkpoint's folder is locked
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
            with self._core.gate.still():
                saver = self.opened(folder, keep)
        run: Run | None = None
        before = None if saver is None else saver.last
        is_counted = None if saver is None else partial(_has_committed, saver, before)
        spoken_of = saver is not None or self.speaks_of(None)
        if spoken_of:
            self.count_into(counters)
        try:
            with self.files.opened(quarantine, open_deltas, resume, spoken_of, is_counted) as files:
                has_new = saver is not None and self._any_new(files)
                with self._core.gate.still():
                    run = Run(self, self._core, saver, reader, known, met, every, files, has_new, may_commit, counters)
                    self._runs.append(run)
                with self._ended(run):
                    yield run
        finally:
            if run in self._runs:
                self._runs.remove(run)
            if saver is not None:
                with self._core.gate.still():
                    if run is None:
                        saver.close()
                    else:
                        run.close()
            if run is not None:
                run.join()

    @contextmanager
    def _ended(self, run: Run) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._may_commit(run, error):
                run.end(completed=False)
            raise

    def _any_new(self, files: RunFiles) -> bool:
        """Whether the run writes a file that no commit counts yet."""
        return files.any_new

    def _may_commit(self, run: Run, error: BaseException) -> bool:
        """What is whole is committed, but not after an error of the commit itself or of a step."""
        return not run.failed and self._core.failed is None

    def opened(self, folder: Folder, keep: int) -> Saver:
        """The saver of a folder, which is locked until it is closed. Under the gate's lock."""
        saver, own = self._saver_of(folder), self._saver
        if own is not None and own is not saver:
            raise UsageError(f"{folder.path}: this engine commits to {own.folder.path} at this moment")
        if saver.last is None and (numbers := folder.numbers()):
            raise UsageError(
                f"{folder.path}: holds commit {numbers[-1]}, which this engine neither wrote nor was restored from; "
                "Engine.restore it, then run"
            )
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
        last = folder.newest() if (known := self._descends.get(folder.path.resolve())) else None
        if last is not None and last.digests != known:
            last = None  # somebody else's
        # Nobody has followed what changed since: the next commit is a base.
        saver = self._new_saver(folder, last, False)
        if self._saver is None or not self._saver.in_use:
            if self._saver is not None:
                self._remember(self._saver)
            self._saver = saver
        return saver

    def _remember(self, saver: Saver) -> None:
        """The folder of a saver that goes: a run may resume there while nobody else commits to it."""
        if saver.last is not None:
            self._descends[saver.folder.path.resolve()] = saver.last.digests

    def _new_saver(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        return Saver(folder, tables_to_save(self._core), self._described, last, delta)

    def _described(self) -> Contents:
        return describe(self._core, self.positions, self.files.commit(), self.totals)


def _has_committed(saver: Saver, before: Commit | None) -> bool:
    return saver.last is not before
