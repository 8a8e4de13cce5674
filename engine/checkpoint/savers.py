"""The savers of an engine: that of its last folder, which tracks the dirty rows, and where those of others ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from penstock.base.errors import UsageError
from penstock.base.validation import whole
from penstock.checkpoint.engine_state import describe, tables_to_save
from penstock.checkpoint.incremental import Saver
from penstock.checkpoint.ledger import Ledger
from penstock.checkpoint.parts import PartRows
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import TABLE_CHANGES, states_of
from penstock.checkpoint.versions import check_no_version
from penstock.core.engine_core import EngineCore


class Savers:
    """Creates the saver of each folder that an engine commits to.

    ledger : that the commits record; timed : as for a Saver
    on_durable : called with the step of every commit that has become durable

    part : the rows of the engine
    current : of the last folder; None: there is none yet
    """

    def __init__(
        self,
        core: EngineCore,
        ledger: Ledger,
        timed: Callable[[], AbstractContextManager[Any]],
        on_durable: Callable[[int], None],
    ) -> None:
        self._core, self._ledger, self._timed, self._on_durable = core, ledger, timed, on_durable
        self.part = PartRows(core.tables.held.shares)
        self.current: Saver | None = None
        # For each other folder: the digests of its last commit that the state descends from.
        self._descends: dict[str, tuple[str, ...]] = {}

    def begin(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        """Create the current saver, of a folder whose last commit the state is."""
        self.current = self._new(folder, last, delta)
        return self.current

    def open_for_run(self, folder: Folder, keep: int, resume: bool) -> Saver:
        """Open the saver of a folder for a run or a service: the folder is locked until the saver is closed.

        Raises UsageError if the engine commits to another folder, or the folder holds commits of another engine.
        """
        check_no_version(folder.files.address)
        folder.check_place(resume)
        with self._core.gate.still():
            saver, own = self.of(folder), self.current
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

    def of(self, folder: Folder) -> Saver:
        """Return the current saver if it is of this folder, else a new saver, which replaces it.

        If a run commits with the current saver, it must observe every step: then the new one is for a single commit,
        after which ``ended`` must follow. Raises UsageError for the folder of a run or a service in progress.
        """
        own = self.current
        if own is not None and own.in_use and own.folder.files.identity() == folder.files.identity():
            raise UsageError(f"{folder.path}: a run or a service of this engine commits there at this moment")
        if self.current is not None and self.current.is_for(folder):
            return self.current
        descends = self._descends.get(folder.files.identity())
        last = folder.newest() if descends else None
        if last is not None and last.digests != descends:
            last = None  # a commit of another engine
        # The dirty rows since then are unknown: the next commit is a base.
        saver = self._new(folder, last, False)
        if self.current is None or not self.current.in_use:
            before, self.current = self.current, saver
            if before is not None:
                self.ended(before)
        return saver

    def ended(self, saver: Saver) -> None:
        """Record the last commit of a saver that is not the current one: a run may resume there until another writer
        commits."""
        if saver is not self.current and saver.last is not None:
            self._descends[saver.folder.files.identity()] = saver.last.digests

    def _new(self, folder: Folder, last: Commit | None, delta: bool) -> Saver:
        contents = partial(describe, self._core, self._ledger)
        saver = Saver(
            folder, tables_to_save(self._core), contents, last, delta, self._timed, self.part, self._on_durable
        )
        saver.has_new_tables = last is not None and last.contents.get(TABLE_CHANGES, []) != states_of(
            self._ledger.changes
        )
        self._core.observe(saver)
        return saver
