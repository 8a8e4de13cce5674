"""A job on a Ray cluster: what it applies, where it runs, and how often it goes back to its last commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, PeerError, UsageError
from penstock.base.validation import fraction, whole
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import first_names
from penstock.checkpoint.versions import check_no_version
from penstock.contrib.ray.cluster import Actors, LostError, RemoteTables, started, with_accelerator
from penstock.contrib.ray.driver import Driver
from penstock.contrib.ray.owners import Ended
from penstock.contrib.shares import WholeTables
from penstock.contrib.shares.joined_deltas import JoinedDeltas
from penstock.contrib.shares.joined_reports import joined_problems, joined_tables, joined_variants
from penstock.core.core_creation import checked_reduction
from penstock.io.decoding.reader import ReadOptions, unverified_text
from penstock.io.delta_sink import open_deltas
from penstock.io.quarantine import parse_on_bad_row
from penstock.io.run_files import RunFiles
from penstock.io.sources.opening import expanded
from penstock.model.command_options import JobOptions
from penstock.model.config.clipping import check_no_norms
from penstock.model.frozen_tables import check_no_until_step
from penstock.model.keywords import with_options
from penstock.model.learning_rates import LearningRates
from penstock.model.options import DeltaOptions
from penstock.model.stats import Counters, Report

if TYPE_CHECKING:
    from penstock.contrib.ray.job_metrics import JobMetrics

log = logging.getLogger("penstock")

# LostErrors in a row without a commit between them, after which a job ends.
MOST_FAILURES = 10


class Job:
    """Applies sources to tables whose rows are in the shares of a Ray cluster.

    Attributes
    ----------
    actors : Actors
        Of the job that runs.
    progress : callable or None
        Called after every block with the counters of the job and the global step.

    Notes
    -----
    The result equals that of one engine, bit for bit. After an actor or a node has died, the job continues from its
    last commit (docs/ray.md).

    Examples
    --------
    >>> import penstock as ps
    >>> from penstock.ray import Job
    >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
    >>> job = Job(config, ["s3://logs/worker-0", "s3://logs/worker-1"], shares=4, checkpoint="s3://runs/1", every=100)
    >>> report = job.run()  # doctest: +SKIP
    """

    @with_options(JobOptions)
    def __init__(self, options: JobOptions) -> None:
        """Create a job; ``run`` starts it.

        Parameters
        ----------
        config : EmbeddingConfig
            The tables and their optimizers.
        sources : sequence
            Paths, URIs, datasets of Ray Data, or functions that return a source: anything that each machine can open
            again. A frame of each in turn is the order of the job, as ``Engine.run`` has with ``merge="round"``.
        {options}

        Raises
        ------
        UsageError
            If an option is out of range or missing; nothing is started yet.
        ConfigError
            If the configuration cannot run.
        """
        if options.shares is None:
            raise UsageError("Job: give shares=, the number of owners of the rows")
        config, sources = options.config, expanded(options.sources)
        if not sources:
            raise UsageError("sources: give at least one")
        check_no_until_step(config.tables, "a job")
        check_no_norms(config.clip, config.limit, "a job")
        whole("shares", options.shares, 1)
        readers = min(len(sources), options.shares if options.readers is None else options.readers)
        whole("readers", readers, 1)
        self.options, self._num_readers = replace(options, sources=sources, readers=readers), readers
        for name, least in (("rounds_per_block", 1), ("every", 1), ("limit", 0)):
            if getattr(options, name) is not None:
                whole(name, getattr(options, name), least)
        self._owner_options = with_accelerator(options.owner_options or {}, options.accelerator)
        checked_reduction(config, None, options.reduction)
        if options.checkpoint is None and (options.every is not None or options.resume):
            raise UsageError("every, resume: name a folder for commits, with checkpoint=")
        if options.max_stale is not None:
            fraction("max_stale", options.max_stale)
        mode, self._quarantine = parse_on_bad_row(options.on_bad_row)
        rates = LearningRates(config.num_tags, options.learning_rates, config.schedules)
        self._read = ReadOptions.of_config(config, vars(options), on_bad_row=mode, rates_needed=rates.missing)
        self._delta_options: DeltaOptions | None = None
        if options.deltas is not None:
            self._delta_options = DeltaOptions.among(vars(options))
            JoinedDeltas(config.tables, self._delta_options, 0)
        self._metrics: JobMetrics | None = None
        self.progress: Callable[[Counters, int], None] | None = None

    def metrics(self) -> JobMetrics:
        """Return the metrics of the whole job, as ``penstock.metrics.Metrics`` of an engine. Call it before ``run``.

        Returns
        -------
        JobMetrics
        """
        if self._metrics is None:
            from penstock.contrib.ray.job_metrics import JobMetrics  # needs the extra metrics

            self._metrics = JobMetrics(self.options.config)
        return self._metrics

    def run(self) -> Report:
        """Run the job to the end of its sources.

        Returns
        -------
        Report
            Of the whole job.

        Raises
        ------
        InputError
            If a source is invalid. The last commit holds the frames before the bad one.
        PeerError
            If actors are lost again and again without a commit between.
        """
        began, options = time.perf_counter(), self.options
        folder = None if options.checkpoint is None else Folder(options.checkpoint)
        if folder is not None:
            check_no_version(folder.files.address)
            folder.check_place(options.resume)
        accelerators = None if options.accelerator is None else (options.accelerator, options.shares)
        if options.config.gate_policy.workers is not None:
            raise ConfigError("gate.rounds: the readers of a job have an order of their own; rounds are of one engine")
        ray = started(options.address, options.shares + self._num_readers, accelerators)
        with nullcontext() if folder is None else folder.locked():
            commit = None
            if folder is not None:
                folder.tidy()
                commit = folder.newest()
            if commit is not None:
                self.options = replace(options, config=options.config.drawn_as(first_names(commit.contents)))
            self.actors = self._make_actors(ray, commit)
            try:
                with nullcontext() if self._metrics is None else self._metrics.run():
                    return self._until_it_ends(folder, commit, began)
            finally:
                self.actors.close()

    # ---- internal

    def _make_actors(self, ray: Any, commit: Commit | None) -> Actors:
        options = self.options
        required, seed = options.num_required or options.config.gate_num_required or 1, options.seed
        if commit is not None:
            required, seed = commit.contents["num_required"], commit.contents["seed"]
        samples, of_owners = None if self._metrics is None else self._metrics.samples, replace(options, sources=())
        readers = [(options, rank, self._read, seed, required == 1) for rank in range(self._num_readers)]
        owners = [(of_owners, rank, seed, samples) for rank in range(options.shares)]
        return Actors(ray, readers, owners, options.reader_options or {}, self._owner_options)

    def _until_it_ends(self, folder: Folder | None, commit: Commit | None, began: float) -> Report:
        options, failures, before, skipped = self.options, 0, Counters(), None
        files = RunFiles(nullcontext, {} if commit is None else commit.contents)
        while True:
            driver: Driver | None = None
            try:
                driver = Driver(self.actors, folder, commit, options, self.progress, self._metrics)
                skipped = driver.num_skipped if skipped is None else skipped
                if self._metrics is not None:
                    self._metrics.before, self._metrics.num_skipped = before, skipped
                ended, state_hash = self._attempt(driver, folder, commit, files)
                return self._report(before, skipped, began, driver, ended, state_hash)
            except LostError as failure:
                newest = None if folder is None else folder.newest()
                has_commit = newest is not None and (commit is None or newest.number > commit.number)
                failures = 0 if has_commit else failures + 1
                if driver is not None and has_commit:
                    before = before.plus(driver.committed)
                if folder is None and (options.deltas is not None or self._quarantine is not None):
                    raise PeerError(f"{failure}; what the job wrote cannot be taken back without checkpoint=") from None
                if failures > MOST_FAILURES:
                    raise PeerError(f"{failures} failures without a commit between them, the last: {failure}") from None
                commit = newest
                place = "the start" if commit is None else f"commit {commit.number}"
                log.warning("%s; the job continues from %s", failure, place)

    def _attempt(
        self, driver: Driver, folder: Folder | None, commit: Commit | None, files: RunFiles
    ) -> tuple[list[Ended], str | None]:
        """Run to the end. Return what the owners report, and the state hash if it is wanted."""
        options, joined, opened = self.options, None, None
        if self._delta_options is not None and options.deltas is not None:
            joined = JoinedDeltas(options.config.tables, self._delta_options, driver.changed_step)
            opened = partial(open_deltas, options.deltas, joined.schema, driver.changed_step)
        is_committed = None if folder is None else lambda: driver.has_committed
        with files.open(self._quarantine, opened, commit is not None, is_committed):
            ended = driver.run(files, joined)
        driver.positions.check_stale(options.max_stale)
        state_hash = None
        if options.state_hash or options.out is not None:
            tables = WholeTables(options.config, [RemoteTables(self.actors, rank) for rank in range(options.shares)])
            if options.state_hash:
                state_hash = tables.hash(driver.global_step)
            if options.out is not None:
                tables.write(options.out)
        return ended, state_hash

    def _report(
        self, before: Counters, skipped: int, began: float, driver: Driver, ended: list[Ended], state_hash: str | None
    ) -> Report:
        counters, verified = before.plus(driver.counters), driver.verified
        problems = joined_problems([end.problems for end in ended])
        is_verified = len(verified) == len(self.options.sources) and all(verified.values())
        return counters.report(
            time.perf_counter() - began,
            pending=driver.num_accumulated,
            global_step=driver.global_step,
            verified=is_verified,
            unverified=None if is_verified else unverified_text(driver.checksums),
            tables=joined_tables([end.tables for end in ended]),
            learning_rates=ended[0].last_rates if self.options.config.num_tags else None,
            notes=(*counters.notes(driver.first_bad), *driver.notes, *problems),
            skipped=skipped,
            state_hash=state_hash,
            variants=joined_variants([end.variants for end in ended]),
            device_problems=len(problems),
        )
