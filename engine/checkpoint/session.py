"""The checkpoints of an engine: what its runs commit, to which folder, and where they resume."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from penstock.base.errors import StateError, UsageError, UsageTypeError
from penstock.base.validation import whole
from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.engine_state import encoded
from penstock.checkpoint.ledger import Ledger
from penstock.checkpoint.manifests import VECTORS
from penstock.checkpoint.rollbacks import Rollback, SavedState, clock_offset
from penstock.checkpoint.run_commits import RunCommits
from penstock.checkpoint.savers import Savers
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import TableChange, described
from penstock.checkpoint.versions import NamedCommit, check_no_version, make_tag
from penstock.core.engine_core import EngineCore
from penstock.core.freshness import COMMIT
from penstock.core.observers import ALL_UNSEEN, Pushed, StepObserver, Unseen
from penstock.io.decoding.reader import FrameReader
from penstock.io.run_files import DELTAS, OpenDeltas, RunFiles
from penstock.model.config.specs import TableSpec
from penstock.model.options import KEEP, CommittingOptions
from penstock.model.stats import Counters

log = logging.getLogger("penstock")


class CheckpointSession(StepObserver):
    """The runs of an engine that are in progress, the savers of its folders, and the ledger that its commits record.

    timed : context manager around work that a step has to wait for
    counters : of the engine before its first run
    in_job : whether the engine is a share of a job, which alone writes manifests; then only ``write_part`` commits
    on_durable : called with the step of every commit that has become durable
    """

    def __init__(
        self,
        core: EngineCore,
        timed: Callable[[], AbstractContextManager[Any]],
        counters: Counters,
        in_job: bool,
        on_durable: Callable[[int], None],
    ) -> None:
        self._core, self._counting, self._in_job = core, timed(), in_job
        self.ledger = Ledger(RunFiles(core.gate.still), counters)
        self._savers = Savers(core, self.ledger, timed, on_durable)
        self._runs: list[RunCommits] = []  # in progress, in the order in which they began

    @property
    def positions(self) -> Positions:
        """The positions of the last run in its sources."""
        return self.ledger.positions

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
        self.ledger.resume(commit.contents, change, adds_rows, self._core.global_step)
        files = tuple(file for file in commit.files if file.part == self._savers.part.name)
        is_same = change is None and self.is_same(commit)
        if not self._in_job:
            self.ledger.files = RunFiles(self._core.gate.still, commit.contents)
            if change is not None:
                self.begin_new_deltas()  # the file would lack the change
        elif files and is_same:
            commit = Commit(commit.number, files, commit.contents)
        else:
            return
        self._savers.begin(folder, commit, is_same and commit.files == files)

    def is_same(self, commit: Commit) -> bool:
        """Return whether a delta may follow a commit: its configuration may initialize rows that no file contains
        differently, and then the next commit is a base."""
        return bool(commit.contents["config"] == encoded(self._core.config))

    def begin_new_deltas(self) -> None:
        """Let the next run begin a new file of deltas, also if it resumes."""
        self.ledger.files.committed[DELTAS] = None

    # ---- the core's steps

    def pushed(self, pushed: Pushed) -> None:
        """Count frames of a run in its positions: else a commit could contain frames that its position omits."""
        run: RunCommits | None = pushed.context.run
        if run is not None and pushed.stop > pushed.first:
            with self._counting:
                run.count(pushed.context.source, pushed.run, pushed.first, pushed.stop, pushed.is_stale)
            if self.ledger.positions is not run.positions and self._stores(run):
                self.ledger.positions = run.positions

    def thawed(self, specs: Sequence[TableSpec]) -> None:
        """Record a change of the tables, of which readers of earlier steps learn."""
        step, positions = self._core.global_step, self.ledger.positions
        log.info("%s", self.ledger.change([spec.name for spec in specs], step))
        if positions.lineage is not None:
            positions.lineage = positions.lineage.started(step, True)
            for run in self._runs:
                run.positions.lineage = positions.lineage

    def most_unseen(self) -> Unseen:
        return Unseen(min([run.most_unseen for run in self._runs])) if self._runs else ALL_UNSEEN

    def _stores(self, run: RunCommits) -> bool:
        """Return whether commits store the position of this run, and not of another one."""
        return all(other is run or not other.commits for other in self._runs)

    # ---- commits

    def save(self, path: str | os.PathLike[str]) -> None:
        """Commit the current state to a folder, and wait until it is durable. Raises UsageError in a job."""
        if self._in_job:
            raise UsageError(f"{path}: this engine holds a share of the rows, and only its job commits all of them")
        with self._core.still():
            folder = Folder(path)
            check_no_version(folder.files.address)
            saver = self._savers.of(folder)
            saver.open()
            try:
                self.positions.check_counted()
                for run in self._runs:
                    run.positions.check_counted()  # an interrupt of the run's thread is not one of this thread
                    run.check()
                self._core.tables.wait()
                self._core.freshness.begins(COMMIT)
                saver.commit()
                self._core.freshness.ends(COMMIT)
            finally:
                saver.close()
                self._savers.ended(saver)

    def tag(self, name: str, note: str, move: bool) -> None:
        """Give the last commit a name. Raises StateError if there is none, UsageError for the name."""
        # Another object for the folder: the saver may have locked it through its object.
        make_tag(self.folder, lambda: self._last_commit("tag")[1], name, note, move)

    @property
    def folder(self) -> Folder:
        """The folder of the last commit. Raises StateError if there is none."""
        return Folder(self._last_commit("tag")[0].files.address)

    def saved(self, version: str | int | None) -> SavedState:
        """Return the verified state of another commit of this engine's folder. Raises StateError and UsageError."""
        if version is None:
            raise UsageTypeError("rollback: expected a tag or a step, got None")
        chosen = NamedCommit.of(self._last_commit("rollback")[0].files.address, version)
        core = self._core
        now = {
            "tables": [described(spec) for spec in core.config.tables],
            "seed": core.seed,
            VECTORS: core.tables.vector_files,
        }
        return chosen.read(lambda commit: SavedState(chosen.folder, commit, now))

    def _last_commit(self, action: str) -> tuple[Folder, Commit]:
        """Return this engine's folder, and its last commit. Raises StateError if there is none, and in a job."""
        if self._in_job:
            raise StateError(f"{action}: this engine holds a share of the rows; use penstock {action} DIR for its job")
        with self._core.gate.still():
            if self._core.failure.is_forked:
                self._core.failure.check_whole()
            saver = self._savers.current
            if saver is None or saver.last is None:
                raise StateError(f"{action}: this engine has no commit yet; save it, or run it with checkpoint=")
            return saver.folder, saver.last

    def roll_back(self, state: SavedState) -> Rollback:
        """Step forward to the state of another commit, and drop the frames in the gate."""
        with self._core.still():
            commit, saver = state.commit, self._savers.current
            offset, time = clock_offset(commit, self._core.global_step + 1), commit.contents["pipeline"].get("time")
            num_frames = self._core.roll_back(lambda: state.replace(self._core), offset, time)
            self.ledger.counters.rolled_back += num_frames
            if saver is not None and self.is_same(commit) and commit.parts == (self._savers.part.name,):
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

    # ---- runs

    def commits(self, folder: Folder, every: int | None, resume: bool, listener: CommitListener) -> CommitSession:
        """Open the commits of a service to a folder. every : steps between two commits; None: only on request"""
        return CommitSession(self._core, self._savers.open_for_run(folder, KEEP, resume), every, listener)

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
        files = RunFiles(self._core.gate.still, self.ledger.files.committed)
        saver = None if checkpoint is None else self._savers.open_for_run(Folder(checkpoint), options.keep, resume)
        run = RunCommits(self._core, saver, reader, counters, start, positions, every, files, may_commit)
        has_committed = None if saver is None else saver.has_committed
        with closing(run), files.open(quarantine, open_deltas, resume, has_committed):
            with self._core.gate.still():
                if self._stores(run):
                    self.ledger.count_into(counters)
                    self.ledger.files = files
                    if not start.num_frames:
                        self.ledger.positions = positions
                self._runs.append(run)
            try:
                yield run
            except BaseException:
                if not run.failed and self._core.failure.reason is None:  # neither a commit nor a step has failed
                    run.end(completed=False)
                raise
            finally:
                with self._core.gate.still():  # a push of another thread asks all runs for their limits
                    self._runs.remove(run)
