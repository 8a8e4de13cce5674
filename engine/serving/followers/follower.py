"""Keep a target up to date with a service: deltas in order, a full copy of the tables after a gap.

A follower knows what it left in the target, and each transaction and each poll compares that with what is there. The
target may have been set back by its own means, or emptied: the follower continues from what it holds. It may also have
been written by another follower: this one ends, because two would undo each other's work for as long as both run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import penstock.base.interrupts as interrupts
from penstock.base.errors import DeltasGoneError, ServiceError, StateError, TargetError, UsageError
from penstock.base.events import report
from penstock.core.freshness import DELTA, age_s
from penstock.io.patience import Patience
from penstock.model.row_encodings import FLOAT32, encoding_of
from penstock.model.version import FIRST_EPOCH, Epoch, Lineage, Version
from penstock.serving.flight import Client, Delta, TableAt
from penstock.serving.flight.connection import as_source
from penstock.serving.followers.changes import changes_of, merged
from penstock.serving.followers.target import FollowedJob, MovedError, Stored, TableRows, Target

# Deltas that are applied together, so that a follower that is behind needs fewer transactions.
MOST_BYTES = 64 << 20
# Seconds between two checks for a signal.
TICK_S = 0.1
# An attempt to connect takes no longer than the patience, but may take so long.
_SHORTEST_CONNECT_S = 0.5


@dataclass
class Progress:
    """What a follower has done.

    Attributes
    ----------
    version : Version or None
        Of the target's rows; None: not known yet.
    deltas, transactions : int
        Applied.
    full_copies : int
        How often all tables were written.
    rows, removed : int
        Written in transactions.
    retries : int
        Failures of the target.
    set_back : int
        How often the target held an earlier state than the follower left there.
    frame_time : int or None
        The largest time of the frames in the target's rows, in seconds; None: unknown.
    age_s : float or None
        The seconds since then; 0 if it is in the future.
    """

    version: Version | None = None
    deltas: int = 0
    transactions: int = 0
    full_copies: int = 0
    rows: int = 0
    removed: int = 0
    retries: int = 0
    set_back: int = 0
    frame_time: int | None = None

    @property
    def age_s(self) -> float | None:
        return age_s(self.frame_time)

    @property
    def step(self) -> int | None:
        return None if self.version is None else self.version.step


@dataclass
class Follower:
    """Follows one service into one target.

    Parameters
    ----------
    client : Client
        Client of the service (``penstock.io.flight.connect``).
    target : Target
        The store.
    patience_s : float
        Seconds to retry while the target fails; the client has its own.
    interval_s : float
        Seconds between two requests for deltas; each takes what was published since.
    replaces : bool
        Whether to overwrite the rows of another job.
    progress : Progress
        Counts, for display.
    rows : {"float32", "bfloat16", "int8"}
        How the target stores rows. One that stores them in another way is filled again.

    Raises
    ------
    UsageError
        If the target takes no encoded rows.
    """

    client: Client
    target: Target
    patience_s: float
    interval_s: float
    replaces: bool = False
    progress: Progress = field(default_factory=Progress)
    rows: str = field(default=FLOAT32.name, kw_only=True)
    _job: FollowedJob | None = None  # of the service; None: not read since it may have changed
    _epochs: list[str] = field(default_factory=list)  # of the service, up to that of the last position
    _stored: Stored | None = None  # what the target holds
    _frame_time: int | None = None  # of published deltas, when the job was read
    _is_read: bool = False  # whether that is known: after a failure it is not
    _last: Stored | None = None  # what it held last, if it is empty now
    _tried: Stored | None = None  # what a transaction of unknown outcome leaves there

    def __post_init__(self) -> None:
        self._rows = encoding_of(self.rows)
        if self._rows is not FLOAT32 and not self.target.takes_encoded:
            raise UsageError(f"--rows {self.rows} (rows=): {self.target.name} holds rows as lists of float32; omit it")

    def run(self, once: bool = False, on_start: Callable[[], object] = lambda: None) -> None:
        """Follow until a signal, or until all that is published is applied.

        Parameters
        ----------
        once : bool
            End when all that is published is applied.
        on_start : callable
            Called when the target has the rows of a step for the first time.

        Raises
        ------
        InputError
            If the service stays unreachable.
        TargetError
            If the target stays unreachable.
        UsageError
            For wrong credentials.
        StateError
            If the target belongs to another job, or another follower is ahead.
        """
        self.target.connect_s = max(min(self.target.connect_s, self.patience_s), _SHORTEST_CONNECT_S)
        patience = Patience(self.patience_s, starts_over=False)
        has_begun = False
        while True:
            try:
                is_current = self.round()
            except TargetError as error:
                self.progress.retries += 1
                patience.wait(error)
                continue
            patience.good()
            if not has_begun:
                has_begun = True
                on_start()
            if once and is_current:
                return
            if is_current:
                self._pause()

    def _pause(self) -> None:
        until_s = time.monotonic() + self.interval_s
        while (left_s := until_s - time.monotonic()) > 0:
            interrupts.pause(min(left_s, TICK_S))

    def round(self) -> bool:
        """Apply what is published, or fill the target.

        Returns
        -------
        bool
            False if there may be more to do.

        Raises
        ------
        InputError, UsageError, StateError
            As ``run``.
        TargetError
            If the target fails; the method may be called again then.
        """
        try:
            return self._round()
        except MovedError as error:
            self._tried = None
            self._continue_from(error.stored)
            return False
        except TargetError:
            # Whether the last transaction was applied is unknown: read what the target holds again.
            self._is_read = False
            self.target.close()
            raise

    def _round(self) -> bool:
        job = self._job or self._read_job()
        if not self._is_read:
            self._continue_from(self._read_stored())
        stored = self._stored
        if stored is not None and stored.job != job and not self.replaces:
            job.check(stored.job, self.target.name)
        if stored is None or stored.job != job:
            self._fill(job)
            return False
        try:
            has_applied = self._apply_published(stored)
        except DeltasGoneError:
            job = self._read_job()
            if not self.replaces:
                job.check(stored.job, self.target.name)
            self._fill(job)
            return False
        if not has_applied:
            self.target.compare(self._read_stored(), stored)
        return True

    def _read_job(self) -> FollowedJob:
        """Read the job and the epochs of the service."""
        with as_source():
            self._job, status = FollowedJob.of(self.client, self._rows), self.client.status()
        self._epochs, self._frame_time = [epoch for epoch, *_ in status["epochs"]], status.frame_times.get(DELTA)
        return self._job

    def _read_stored(self) -> Stored | None:
        with self.target.failures():
            return self.target.stored()

    def _continue_from(self, stored: Stored | None) -> None:
        """Continue from what the target holds. Raises StateError if another follower has left it there."""
        before, last = self._stored, self._tried or self._last
        if stored is not None and stored != before and last is not None:
            self._check_not_behind(stored, last)
        if before is not None and (stored is None or before.is_ahead_of(stored, self._epochs)):
            self.progress.set_back += 1
            step = None if stored is None else stored.version.step
            report("target_set_back", target=self.target.name, step=step, had=before.version.step)
        self._note_stored(stored)
        self._is_read = True

    def _check_not_behind(self, stored: Stored, last: Stored) -> None:
        rows = stored.job.rows.name
        if rows != last.job.rows.name and not last.is_ahead_of(stored, self._epochs):  # else it was set back
            raise StateError(
                f"{self.target.name}: another follower has written rows of {rows}, and this one those of "
                f"{last.job.rows.name}; let one follower write to it, and end the other ones"
            )
        if stored.is_ahead_of(last, self._epochs):
            there, here = stored.version, last.version
            same = "" if there.epoch == here.epoch else f" of epoch {there.epoch}"
            job = "" if stored.job == last.job else " of another job or history"
            raise StateError(
                f"{self.target.name}: another follower is ahead: it holds step {there.step}{same}{job}, and this "
                f"follower has come to step {here.step}; let one follower write to it, and end the other ones"
            )

    def _note_stored(self, stored: Stored | None) -> None:
        """Note what the target holds."""
        self._stored, self._tried = stored, None
        self._last = stored or self._last
        self.progress.version = None if stored is None else stored.version

    def _apply_published(self, stored: Stored) -> bool:
        """Apply the deltas after a version. Return whether there are any."""
        waiting: list[Delta] = []
        num_bytes = 0
        with as_source():
            # A service that has stopped to answer would keep a stream waiting for ever. The deltas may be newer.
            frame_time = self.client.status().frame_times.get(DELTA)
            for delta in self.client.deltas(stored.version, rows=self.rows):
                interrupts.check()
                waiting.append(delta)
                num_bytes += sum(batch.nbytes for batch in delta.batches)
                if num_bytes >= MOST_BYTES:
                    self._apply(stored.job, waiting)
                    waiting, num_bytes = [], 0
        self.target.frame_time = frame_time
        if waiting:
            self._apply(stored.job, waiting)
        self.progress.frame_time = frame_time
        return self._stored != stored

    def _apply(self, job: FollowedJob, deltas: list[Delta]) -> None:
        for group in [[delta] for delta in deltas] if self.target.per_delta else [deltas]:
            new = Stored(job, group[-1].version)
            self._write(self.target.apply, new, changes_of(group, job))
            self.progress.deltas += len(group)
            report("applied", target=self.target.name, step=new.version.step, deltas=len(group), **self._age())

    def _write(self, write: Callable[[Stored, list[TableRows], Any], None], new: Stored, rows: list[TableRows]) -> None:
        """Run one transaction of the target. write : ``apply`` or ``replace`` of it"""
        if new.version.epoch not in self._epochs:  # the service was started again since: it is the newest
            self._epochs.append(new.version.epoch)
        self._tried = new
        with self.target.failures():
            write(new, rows, self._stored)
        self._note_stored(new)
        self.progress.transactions += 1
        self.progress.rows += sum(len(table.ids) for table in rows)
        self.progress.removed += sum(len(table.removed) for table in rows)

    def _age(self) -> dict[str, int]:
        age = age_s(self.target.frame_time)
        return {} if age is None else {"age_s": round(age)}

    def _fill(self, job: FollowedJob) -> None:
        """Fetch all tables, and replace those of the target by them."""
        frame_time = self._frame_time  # that of the tables, or before
        with as_source():
            try:
                tables = {name: self.client.table(name, rows=self.rows) for name in job.tables}
            except (ServiceError, UsageError):
                if self._read_job() == job:
                    raise
                return  # the service was started again meanwhile, without one of the tables
            if self._read_job() != job or any(table.version.lineage != job.lineage for table in tables.values()):
                return  # the service was started again meanwhile, with other tables or without its checkpoint
            try:
                rows, version = at_one_version(self.client, job, tables)
            except DeltasGoneError:
                return
        self.target.frame_time = frame_time
        self._write(self.target.replace, Stored(job, version), rows)
        self.progress.frame_time = frame_time
        self.progress.full_copies += 1
        report("filled", target=self.target.name, step=version.step, tables=len(rows), **self._age())


def at_one_version(client: Client, job: FollowedJob, tables: dict[str, TableAt]) -> tuple[list[TableRows], Version]:
    """Return the rows of all tables of a job at one version: those that were fetched first are older than the others.

    Raises DeltasGoneError if the tables are of two histories, or the service no longer has the deltas in between.
    """
    rows = {name: rows_of(name, table) for name, table in tables.items()}
    versions = sorted({table.version for table in tables.values()}, key=lambda version: version.step)
    if len(versions) < 2:
        return list(rows.values()), versions[0] if versions else Version.of(job.lineage, FIRST_EPOCH, 0)
    deltas = list(client.deltas(versions[0], rows=job.rows.name))
    if deltas and deltas[-1].version.step > versions[-1].step:
        versions.append(deltas[-1].version)
    status = client.status()
    history = Lineage(status.version.lineage, tuple(Epoch(*epoch) for epoch in status["epochs"]))
    for version in versions:  # the service may have been started again in between
        history.check(version)
    for changes in changes_of(deltas, job):  # of a newer table, some of them again, which changes nothing
        rows[changes.table] = merged(rows[changes.table], changes)
    return list(rows.values()), versions[-1]


def rows_of(name: str, table: TableAt) -> TableRows:
    """Return all rows of a table."""
    ids = np.arange(len(table.rows)) if table.keys is None else table.keys
    return TableRows(name, ids, table.rows, ids[:0])
