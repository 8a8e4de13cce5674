"""Keep a target up to date with a service: deltas in order, the tables anew after a gap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow.flight as flight

import penstock.interrupts as interrupts
from penstock.errors import DeltasGoneError, InputError, ServiceError, TargetError, UsageError
from penstock.io.flight import Client, Delta, TableAt
from penstock.io.flight.connection import Patience
from penstock.io.targets.changes import changes_of
from penstock.io.targets.target import Job, TableRows, Target

# Deltas that are applied together, so that a follower that is behind needs fewer transactions.
MOST_BYTES = 64 << 20
# Seconds between two checks for a signal.
TICK_S = 0.1


@dataclass
class Progress:
    """What a follower has done. step : of the target's rows; None: not known yet

    deltas, transactions : applied; anew : how often all tables were taken; rows, removed : written in transactions
    retries : failures of the target
    """

    step: int | None = None
    deltas: int = 0
    transactions: int = 0
    anew: int = 0
    rows: int = 0
    removed: int = 0
    retries: int = 0


@dataclass
class Follower:
    """Follows one service into one target.

    patience_s : how long to retry while the target fails; the client has its own
    interval_s : seconds between two requests for deltas; each takes what was published since
    replaces : whether to overwrite the rows of another job
    """

    client: Client
    target: Target
    patience_s: float
    interval_s: float
    replaces: bool = False
    progress: Progress = field(default_factory=Progress)
    _job: Job | None = None

    def run(self, once: bool = False, began: Callable[[], object] = lambda: None) -> None:
        """Follow until a signal; ``once``: until all that is published is applied.

        began : called when the target has the rows of a step for the first time
        Raises InputError if the service stays unreachable, TargetError if the target does, UsageError for wrong
        credentials, StateError if the target belongs to another job.
        """
        patience = Patience(self.patience_s, starts_over=False)
        has_begun = False
        while True:
            try:
                is_current = self._round()
            except TargetError as error:
                # Whether the last transaction was applied is unknown: read the target's step again.
                self._job = None
                self.progress.retries += 1
                self.target.close()
                patience.wait(error)
                continue
            patience.good()
            if not has_begun:
                has_begun = True
                began()
            if once and is_current:
                return
            if is_current:
                self._pause()

    def _pause(self) -> None:
        until_s = time.monotonic() + self.interval_s
        while (left_s := until_s - time.monotonic()) > 0:
            interrupts.pause(min(left_s, TICK_S))

    def _round(self) -> bool:
        """Apply what is published. Return False if the tables were taken anew, and deltas may follow."""
        job = self._job or self._started()
        if self.progress.step is None:
            self._take_anew(job)
            return False
        waiting: list[Delta] = []
        num_bytes = 0
        try:
            with _of_the_source():
                for delta in self.client.deltas(self.progress.step, lineage=job.lineage):
                    interrupts.check()
                    waiting.append(delta)
                    num_bytes += sum(batch.nbytes for batch in delta.batches)
                    if num_bytes >= MOST_BYTES:
                        self._apply(job, waiting)
                        waiting, num_bytes = [], 0
        except DeltasGoneError:
            self._job = self.progress.step = None
            with _of_the_source():
                current = Job.of(self.client)
            if not self.replaces:
                current.check(job, self.target.name)
            self._job = current
            self._take_anew(current)
            return False
        self._apply(job, waiting)
        return True

    def _started(self) -> Job:
        """Compare the service and the target, and return the job."""
        with _of_the_source():
            job = Job.of(self.client)
        stored = self.target.stored()
        if stored is not None and stored.job != job:
            if not self.replaces:
                job.check(stored.job, self.target.name)
            stored = None
        self.progress.step = None if stored is None else stored.step
        self._job = job
        return job

    def _apply(self, job: Job, deltas: list[Delta]) -> None:
        if not deltas:
            return
        changes, step = changes_of(deltas, job), deltas[-1].step
        self.target.apply(job, deltas, step)
        of = self.progress
        of.step = step
        of.deltas += len(deltas)
        of.transactions += 1
        of.rows += sum(len(table.ids) for table in changes)
        of.removed += sum(len(table.removed) for table in changes)

    def _take_anew(self, job: Job) -> None:
        """Fetch all tables, and replace those of the target by them."""
        with _of_the_source():
            tables = {name: self.client.table(name) for name in job.tables}
        if any(at.lineage != job.lineage for at in tables.values()):
            self._job = None  # the service was restarted meanwhile: begin again
            return
        step = min((at.step for at in tables.values()), default=0)
        rows = [rows_of(name, at) for name, at in tables.items()]
        self.target.replace(job, rows, step)
        self.progress.step = step
        self.progress.transactions += 1
        self.progress.anew += 1
        self.progress.rows += sum(len(table.ids) for table in rows)


def rows_of(name: str, at: TableAt) -> TableRows:
    """Return all rows of a table."""
    ids = np.arange(len(at.rows)) if at.keys is None else at.keys
    return TableRows(name, ids, at.rows, ids[:0])


@contextmanager
def _of_the_source() -> Iterator[None]:
    """Convert the errors of a service that cannot be read: it is a source here."""
    try:
        yield
    except ServiceError as error:
        refused = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)
        if isinstance(error.__cause__, refused):
            raise UsageError(f"{error}; set PENSTOCK_FLIGHT_TOKEN to a token of the service") from error
        raise InputError(str(error)) from error
