"""The checkpoints of an engine: what its runs commit, to which folder, and where they resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from penstock.base.errors import StateError, UsageError, UsageTypeError
from penstock.base.validation import whole
from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.engine_state import describe, encoded
from penstock.checkpoint.incremental import CommitContents
from penstock.checkpoint.parts import PartRows
from penstock.checkpoint.rollbacks import Rollback, SavedState
from penstock.checkpoint.run_commits import RunCommits
from penstock.checkpoint.savers import Savers, check_address
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import TableChange, changes_in, described, states_of
from penstock.checkpoint.versions import NamedCommit, make_tag
from penstock.core.engine_core import NO_LIMIT, EngineCore, Limit, Pushed, StepObserver
from penstock.io.decoding.reader import FrameReader
from penstock.io.run_files import OpenDeltas, RunFiles
from penstock.model.options import KEEP, CommittingOptions
from penstock.model.stats import Counters


class CheckpointSession(StepObserver):
    """The checkpoint state of an engine: its saver, its runs in progress and their positions.

    timed : context manager around work that a step has to wait for
    in_job : whether the engine is a share of a job, which alone writes manifests; then only ``write_part`` commits

    positions : of the last run in its sources
    on_durable : called with the step of every commit that has become durable
    """

    def __init__(self, core: EngineCore, timed: Callable[[], AbstractContextManager[Any]], in_job: bool) -> None:
        self._core, self._timed, self._counting, self._in_job = core, timed, timed(), in_job
        self._part = PartRows(core.tables.held.shares)
        self._savers = Savers(core, self._described, timed, self._part, self._committed, self._table_states)
        self._before, self._running = Counters(), Counters()
        self._counts_runs = False
        self._runs: list[RunCommits] = []  # in progress, in the order in which they began
        self.positions = Positions()
        self._changes: list[TableChange] = []  # of the tables, so far
        self.on_durable: Callable[[int], None] = lambda step: None
        self.files = RunFiles(core.gate.still)

    @property
    def totals(self) -> Counters:
        """Return the counters of all runs, with those before the checkpoint that this engine was restored from."""
        return self._before.plus(self._running)

    @property
    def last(self) -> tuple[Commit, float | None] | None:
        """Return the newest commit, and when it was written (``Folder.written_s``); None if there is none."""
        saver = self._savers.current
        return None if saver is None or saver.last is None else (saver.last, saver.folder.written_s(saver.last))

    @property
    def durable_step(self) -> int | None:
        """Return the step of the newest commit; None if there is none."""
        saver = self._savers.current
        return None if saver is None or saver.last is None else saver.last.step

    def resume_from(self, folder: Folder, commit: Commit, change: TableChange | None, adds_rows: bool) -> None:
        """Continue from a commit that the engine's state was restored from.

        change : of its tables since then; adds_rows : whether its readers lack rows of the tables
        """
        self.positions = Positions.from_state(commit.contents["positions"])
        self._before = Counters.from_state(commit.contents["counters"])
        self._changes = changes_in(commit.contents)
        if self.positions.lineage is not None:  # the steps to come are an epoch: the commit may not be the newest one
            changes_tables = change is not None or adds_rows
            self.positions.lineage = self.positions.lineage.started(self._core.global_step, changes_tables)
        files = tuple(file for file in commit.files if file.part == self._part.name)
        contents, is_same = commit.contents, change is None and self.is_same(commit)
        if change is not None:
            self._changes.append(change)
            self.positions.forget_tables()
            contents = {**contents, "deltas": None}  # a file of deltas would lack the change
        if not self._in_job:
            self.files = RunFiles(self._core.gate.still, contents)
        elif files and is_same:
            commit = Commit(commit.number, files, commit.contents)
        else:
            return
        self._savers.begin(folder, commit, is_same and commit.files == files)

    def is_same(self, commit: Commit) -> bool:
        """Return whether a delta may follow a commit: its configuration may initialize rows that no file contains
        differently, and then the next commit is a base."""
        return bool(commit.contents["config"] == encoded(self._core.config))

    def pushed(self, pushed: Pushed) -> None:
        """Count frames of a run in its positions: else a commit could contain frames that its position omits."""
        run: RunCommits | None = pushed.context.run
        if run is not None and pushed.num_frames:
            with self._counting:
                run.count(pushed)
            if self.positions is not run.positions and self._stores(run):
                self.positions = run.positions

    def limit(self) -> Limit:
        return Limit(min([run.most_unseen for run in self._runs])) if self._runs else NO_LIMIT

    # ---- commits

    def _stores(self, run: RunCommits | None) -> bool:
        """Return whether commits store the position of this run, and not of another one. None: a run without commits"""
        return all(other is run or not other.commits for other in self._runs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit the current state to a folder, and wait until it is durable. Raises UsageError in a job."""
        if self._in_job:
            raise UsageError(f"{path}: this engine holds a share of the rows, and only its job commits all of them")
        with self._core.still():
            folder = Folder(path)
            check_address(folder)
            saver = self._savers.of(folder)
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
                self._savers.ended(saver)

    def tag(self, name: str, note: str, move: bool) -> None:
        """Give the last commit a name. Raises StateError if there is none, UsageError for the name."""
        if self._in_job:
            raise StateError("tag: this engine holds a share of the rows; penstock tag names a commit of its job")
        # Another object for the folder: the saver may have locked it through its object.
        make_tag(Folder(self._last_commit("tag")[0]), lambda: self._last_commit("tag")[1], name, note, move)

    def saved(self, version: str | int | None) -> SavedState:
        """Return the verified state of another commit of this engine's folder. Raises StateError and UsageError."""
        if version is None:
            raise UsageTypeError("rollback: expected a tag or a step, got None")
        if self._in_job:
            raise StateError("rollback: this engine holds a share of the rows; use penstock rollback DIR")
        chosen = NamedCommit.of(self._last_commit("rollback")[0], version)
        tables = [described(spec) for spec in self._core.config.tables]
        return chosen.read(lambda commit: SavedState(chosen.folder, commit, tables, self._core.seed))

    def _last_commit(self, action: str) -> tuple[str, Commit]:
        """Return the address of this engine's folder, and its last commit. Raises StateError if there is none."""
        with self._core.gate.still():
            if self._core.is_forked:
                self._core.check_whole()
            saver = self._savers.current
            if saver is None or saver.last is None:
                raise StateError(f"{action}: this engine has no commit yet; save it, or run it with checkpoint=")
            return saver.folder.files.address, saver.last

    def roll_back(self, state: SavedState) -> Rollback:
        """Step forward to the state of another commit, and drop the frames in the gate."""
        with self._core.still():
            offset = state.clock_offset(self._core.global_step + 1)
            num_frames = self._core.roll_back(lambda: state.replace(self._core), offset, state.time)
            self._running.rolled_back += num_frames
            if not self._counts_runs:
                self._core.counters.rolled_back += num_frames
            commit, saver = state.commit, self._savers.current
            if saver is not None and self.is_same(commit) and commit.parts == (self._part.name,):
                saver.rolled_back(commit)
            return Rollback(commit, self._core.global_step, num_frames)

    def write_part(self, folder: Folder, number: int, attempt: str) -> Commit:
        """Write this share's part of a commit to the folder of its job, which ``join_parts`` completes.

        attempt : of the job, hexadecimal: names the file, so that no other attempt writes it
        """
        with self._core.still():
            self._core.tables.wait()
            saver = self._savers.current
            if saver is None or saver.folder.path != folder.path:
                saver = self._savers.begin(folder, None, False)
            return saver.write_part(number, attempt)

    def commits(self, folder: Folder, every: int | None, resume: bool, listener: CommitListener) -> CommitSession:
        """Open the commits of a service to a folder. every : steps between two commits; None: only on request"""
        saver = self._savers.opened(folder, KEEP, resume)
        return CommitSession(self._core, saver, every, listener, self._core.tables.prepare_thread)

    @contextmanager
    def run(
        self,
        reader: FrameReader,
        counters: Counters,
        options: CommittingOptions,
        quarantine: Path | None,
        may_commit: Callable[[], bool],
        open_deltas: OpenDeltas | None,
    ) -> Iterator[RunCommits]:
        """Open a run, which ends with ``RunCommits.end``. If an error ends it, commit the state if it is consistent.

        options : checkpoint, every, keep and resume, as for ``Engine.run``
        quarantine : the file of bad rows
        may_commit : called before each commit; a resumed run repeats the frames that were not committed
        open_deltas : creates the file of deltas, after the checkpoint's folder is locked
        """
        checkpoint, every, resume = options.checkpoint, options.every, options.resume
        if checkpoint is not None and self._in_job:
            self.save(checkpoint)  # raises
        if checkpoint is None and every is not None:
            raise UsageError("every: sets how often to commit; give checkpoint= too")
        every = None if every is None else whole("every", every, 1)
        positions = Positions([source.name for source in reader.sources], reader.options.merge, checkpoint is not None)
        positions.follow(self.positions)
        start = self.positions if resume else Positions()
        start.seek(reader, positions)
        saver = None if checkpoint is None else self._savers.opened(Folder(checkpoint), options.keep, resume)
        stores = saver is not None or self._stores(None)
        files = RunFiles(self._core.gate.still, self.files.committed)
        if stores:
            self.count_into(counters)
        run: RunCommits | None = None
        try:
            has_committed = None if saver is None else saver.has_committed
            with files.opened(quarantine, open_deltas, resume, has_committed):
                if stores:
                    self.files = files
                with self._core.gate.still():
                    run = RunCommits(self._core, saver, reader, counters, start, positions, every, files, may_commit)
                    self._runs.append(run)
                    if not start.num_frames and self._stores(run):
                        self.positions = positions
                try:
                    yield run
                except BaseException:
                    if not run.failed and self._core.failed is None:  # neither a commit nor a step has failed
                        run.end(completed=False)
                    raise
                finally:
                    self._runs.remove(run)
        finally:
            if run is not None:
                run.close()
            elif saver is not None and not self._core.is_forked:
                with self._core.gate.still():
                    saver.close()

    def count_into(self, counters: Counters) -> None:
        """Count into these counters from now on: the totals are those so far plus these."""
        self._before, self._running = self.totals, counters
        self._counts_runs = True

    def _committed(self, commit: Commit) -> None:
        self.on_durable(int(commit.contents["global_step"]))

    def _table_states(self) -> list[Any]:
        return states_of(self._changes)

    def _described(self) -> CommitContents:
        return describe(self._core, self.positions, self.files.commit(), self.totals, self._changes)
