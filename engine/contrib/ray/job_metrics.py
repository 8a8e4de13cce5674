"""The metrics and the page of a whole job: snapshots of its owners as one, with what only the driver knows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from penstock.checkpoint.store import Commit
from penstock.contrib.pages.metrics import MetricsCollector, measured
from penstock.contrib.shares.joined_reports import joined_snapshots
from penstock.core.telemetry import MetricsSnapshot
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.stats import Counters, TableReport

# Between two snapshots: each costs Ray a task per owner.
EVERY_S = 1.0


class JobMetrics(MetricsCollector):
    """The metrics of a job, as those of an engine: between two blocks, at most ``EVERY_S`` old, and exact at the end.

    Counts and sums over owners are those since the job began, or since it last went back to a commit.

    samples : whether owners sample moments and hot ids
    before : counters of the frames that attempts before this one committed; num_skipped : frames that the first skipped
    """

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config, self.samples, self.before, self.num_skipped = config, False, Counters(), 0
        tables = {spec.name: TableReport(0, None if spec.dynamic else 0) for spec in config.tables}
        self._last = MetricsSnapshot(tables=tables)
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._due_s = 0.0

    def snapshot(self) -> MetricsSnapshot:
        ended_s = time.perf_counter() if self._ended_s is None else self._ended_s
        return replace(self._last, seconds=0.0 if self._began_s is None else ended_s - self._began_s)

    def look_closer(self) -> None:
        self.samples = True

    def checked_step(self) -> int:
        return self._last.global_step

    @contextmanager
    def run(self) -> Iterator[None]:
        """Return a context for the run, which counts its time."""
        self._began_s, self._ended_s = time.perf_counter(), None
        try:
            yield
        finally:
            self._ended_s = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether owners are to be asked for snapshots after the next block."""
        now_s = time.perf_counter()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + EVERY_S
        return True

    def update(
        self,
        owners: Sequence[MetricsSnapshot],
        read_s: float,
        read: Sequence[float | None],
        first_bad: Mapping[str, str],
        commit: tuple[Commit, float | None] | None,
    ) -> None:
        """Take the snapshots of all owners after one block.

        read_s : seconds of all readers; read : the share of each source that is read; None: unknown
        """
        snapshot = joined_snapshots(owners)
        shares = [share for share in read if share is not None]
        self._last = replace(
            snapshot,
            counters=self.before.plus(snapshot.counters),
            stage_s={**snapshot.stage_s, "read": read_s},
            fraction=sum(shares) / len(read) if len(shares) == len(read) else None,
            num_skipped=self.num_skipped,
            first_bad=dict(first_bad),
            commit=None if commit is None else measured(*commit),
        )
