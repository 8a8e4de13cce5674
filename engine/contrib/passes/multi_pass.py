"""A replay in passes: each reads all of the sources, keeps one share of the rows, and leaves its part of one commit.

Gate, steps, stale frames and positions depend on no row, so they are the same in every pass. A pass is an ordinary run
of an engine with a share, which commits to a separate folder and resumes there. The first pass decides where bad input
ends the replay; the others read as many frames, and must find the same ones.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock.base.errors as errors
import penstock.base.interrupts as interrupts
from penstock.api.engine import Engine
from penstock.base.errors import CapacityError, ConfigError, InputError, UsageError
from penstock.base.validation import function
from penstock.checkpoint.engine_state import encoded
from penstock.checkpoint.manifests import trusting
from penstock.checkpoint.parts import join_parts
from penstock.checkpoint.store import PASSES, Commit, Folder
from penstock.checkpoint.table_changes import TableChange, TableChanges, changes_in, first_names
from penstock.checkpoint.versions import check_no_version
from penstock.contrib.passes.pass_folder import PassFolder
from penstock.contrib.passes.pass_memory import check_disk, num_passes
from penstock.contrib.shares import WholeTables
from penstock.contrib.shares.joined_deltas import JoinedDeltas
from penstock.contrib.shares.joined_reports import joined_counters, joined_tables
from penstock.contrib.shares.mapped_rows import mapped_tables
from penstock.contrib.shares.part_deltas import merged
from penstock.io.delta_sink import is_stream, open_deltas
from penstock.io.sources.opening import read_once
from penstock.model.command_options import PassOptions, options_of
from penstock.model.config.clipping import check_no_norms
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frozen_tables import check_no_until_step
from penstock.model.options import DeltaOptions, OneReaderOptions, ReadingOptions, TableChangeOptions
from penstock.model.stats import Report, TableReport, not_finite_note

if TYPE_CHECKING:
    import jax

    from penstock.model.options import Progress

_AGAIN = "nothing was committed: restore the sources, which must not change meanwhile, and resume; or replay them anew"


class PassEngine(Engine):
    """An engine with a share of the rows, which commits alone."""

    commits_alone = True


class MultiPass:
    """Replays sources in passes.

    sources : paths and URIs that can be read several times

    tables : of the commit, after ``run``; count : the number of passes, after ``run`` has begun
    Raises UsageError or ConfigError; nothing is read yet.
    """

    def __init__(
        self, config: EmbeddingConfig, sources: Sequence[str], mesh: jax.sharding.Mesh | None, options: PassOptions
    ) -> None:
        self._config, self._sources, self._mesh, self._options = config, list(sources), mesh, options
        if config.gate_policy.workers is not None:
            raise ConfigError("gate.rounds: a replay in passes takes frames in the order of the sources; use replay")
        check_no_until_step(config.tables, "a replay in passes")
        check_no_norms(config.clip, config.limit, "a replay in passes")
        check_no_version(options.checkpoint)
        self._folder = Folder(options.checkpoint)
        if not isinstance(self._folder.path, Path):
            raise UsageError(
                f"{self._folder.path}: a replay in passes commits to a folder on this machine, not to a URI"
            )
        self._form = DeltaOptions.among(vars(options))
        names = (*options_of("passes", ReadingOptions, OneReaderOptions), "learning_rates")
        self._reading = {name: getattr(options, name) for name in names}
        JoinedDeltas(config.tables, self._form, 0)
        self._changes = {name: getattr(options, name) for name in options_of(None, TableChangeOptions)}
        self._work = PassFolder(self._folder.path / PASSES)
        self.count = 0

    def run(self) -> Report:
        """Run all passes, or those that are left, and commit. Return the report of the whole replay.

        Raises the InputError that ended the first pass, after the commit of the frames before it.
        """
        began, folder = time.perf_counter(), self._folder
        folder.check_place(self._options.resume)
        with folder.locked():
            base = folder.newest()
            change = self._change(base)
            self.count = self._work.begin(self._flags(change), base, self._options.resume, self._choose)
            for rank in range(self.count):
                if self._work.ended(rank) is None:
                    self._pass(rank, base)
                    gc.collect()  # the rows of this share, before those of the next
                interrupts.check()
            ended = [record for rank in range(self.count) if (record := self._work.ended(rank)) is not None]
            self._commit = self._publish(base)
            self._work.remove()
        if ended[0]["error"] is not None:
            kind, problem = ended[0]["error"]
            raise getattr(errors, kind)(problem)
        return _joined([_report(record["report"]) for record in ended], time.perf_counter() - began)

    @property
    def global_step(self) -> int:
        """The global step of the commit, after ``run``."""
        return int(self._commit.contents["global_step"])

    def tables(self) -> WholeTables:
        """Return the tables of the commit, after ``run``: read from its files, page by page."""
        config = self._config.drawn_as(first_names(self._commit.contents))
        return mapped_tables(self._folder, self._commit, config)

    # ---- internal

    def _change(self, base: Commit | None) -> TableChange | None:
        """Return the change of the tables of a commit. Raises StateError, before there is a folder of the passes."""
        changes = TableChanges(**self._changes)
        if base is None:
            changes.check_commit(self._folder.path)
            return None
        place = f"{self._folder.path}, commit {base.number}"
        with trusting(place):
            return changes.of(base, self._config, place).change

    def _flags(self, change: TableChange | None) -> dict[str, Any]:
        """Return what decides the result, as plain data. change : of the tables of the commit"""
        options = self._options
        names = ("passes", "num_required", "reduction", "seed", "on_bad_row", "flush", "limit", "max_stale")
        flags = {name: getattr(options, name) for name in names}
        flags |= {"passes": None} if options.passes == "auto" else {}
        flags |= {"configuration": hashlib.sha256(encoded(self._config).encode()).hexdigest()[:16]}
        flags |= {
            "table change": change and str(change),
            "init": options.init and str(options.init),
            "deltas": options.deltas is not None,
            "form": vars(self._form) | {"slots": self._form.slots or False},
        }
        return flags | {name: value for name, value in self._reading.items() if value is not None}

    def _choose(self) -> int:
        """Return the number of passes of a new replay. Raises CapacityError if memory or disk lack room."""
        check_disk(Path(self._folder.path), self._config.tables)
        passes = self._options.passes
        return num_passes(self._config.tables, self._options.memory) if passes == "auto" else int(passes)

    def _pass(self, rank: int, base: Commit | None) -> None:
        """Run one pass to its end, from its last commit."""
        options, first = self._options, self._work.ended(0) if rank else None
        folder = Folder(self._work.commits(rank))
        resumes = bool(folder.numbers()) or base is not None
        engine = self._engine(rank, folder if folder.numbers() else self._folder if base is not None else None)
        limit, flush, bad = options.limit, options.flush, options.on_bad_row
        if first is not None:
            limit, flush, bad = first["frames"], first["flushes"], "error" if bad == "error" else "drop"
        form = {**vars(self._form), "numbered": False}
        deltas = {} if options.deltas is None else {"deltas": self._work.deltas(rank), **form}
        report, problem = None, None
        try:
            report = engine.run(
                self._sources,
                **{**self._reading, "on_bad_row": bad, "flush": flush, "limit": limit},
                max_stale=None if rank else options.max_stale,
                checkpoint=folder.path,
                every=options.every,
                keep=1,
                resume=resumes,
                progress=self._progress(rank),
                **deltas,
            )
        except InputError as error:
            if rank:
                self._work.forget(rank)
                raise InputError(f"pass {rank + 1} of {self.count}: {error}; {_AGAIN}") from None
            if not folder.numbers():
                raise
            flush, problem = isinstance(error, errors.StaleInputError) and flush, [type(error).__name__, str(error)]
        except CapacityError as error:
            anew = f"a replay in passes only begins anew: remove {self._work.path}; nothing was committed"
            raise CapacityError(f"pass {rank + 1} of {self.count}: {error}; {anew}") from None
        outcome = {
            "frames": engine.session.positions.num_frames,
            "sources": engine.session.positions.get_state()["sources"],
            "flushes": flush,
            "error": problem,
            "report": None if report is None else report.to_dict(),
        }
        if first is not None and outcome["sources"] != first["sources"]:
            self._work.forget(rank)
            pairs = zip(outcome["sources"], first["sources"], strict=True)
            changed = next(source[0] for source, first_source in pairs if source != first_source)
            differs = f"pass {rank + 1} of {self.count} read other frames than the first; {_AGAIN}"
            raise InputError(differs, source=changed)
        self._work.end(rank, outcome)

    def _engine(self, rank: int, folder: Folder | None) -> Engine:
        """Return the engine of a pass. folder : of the commit that it begins with; None: it begins anew"""
        options, share = self._options, (rank, self.count)
        gate: dict[str, Any] = {"num_required": options.num_required, "reduction": options.reduction}
        if folder is not None:
            engine = PassEngine.restore(
                folder.path, self._mesh, options.threads, config=self._config, share=share, **gate, **self._changes
            )
            if folder is self._folder:
                engine.session.begin_new_deltas()
            return engine
        engine = PassEngine(self._config, self._mesh, seed=options.seed, threads=options.threads, share=share, **gate)
        if options.init is not None:
            engine.read_tables(options.init, options.new_tables, learning_rates=options.learning_rates)
        return engine

    def _progress(self, rank: int) -> Progress | None:
        """Return the progress of one pass as that of all of them."""
        if self._options.progress is None:
            return None
        progress = function("progress", self._options.progress)
        return lambda counters, gate, done: progress(
            counters, gate, None if done is None else (rank + done) / self.count
        )

    def _publish(self, base: Commit | None) -> Commit:
        """Commit the parts of all passes, with their deltas merged."""
        options, number, done = self._options, self._folder.next_number(), False
        parts = self._work.linked_into(self._folder, number, self.count)
        if base is not None and changes_in(parts[0].contents) != changes_in(base.contents):
            base = replace(base, contents={**base.contents, "deltas": None})  # a file of deltas would lack the change
        contents = {name: parts[0].contents[name] for name in ("positions", "quarantine", "counters")}
        contents["deltas"] = committed = None if base is None else base.contents.get("deltas")
        with ExitStack() as opened:
            if options.deltas is not None:
                step = 0 if base is None else base.contents["changed_step"]
                joined = JoinedDeltas(self._config.tables, self._form, step)
                is_committed = None if is_stream(os.fspath(options.deltas)) else lambda: done
                deltas = open_deltas(options.deltas, joined.schema, step, committed, is_committed)
                writer = opened.enter_context(deltas)
                files = [self._work.deltas(rank) for rank in range(self.count)]
                for batch in merged(files, joined, self._form.per_steps or 1):
                    writer.write(batch)
                    interrupts.check()
                contents["deltas"] = writer.commit()
            commit = join_parts(self._folder, number, parts, contents, options.keep)
            done = True
        return commit


def check_seekable(sources: Sequence[str]) -> None:
    """Raise UsageError for a source that can be read only once."""
    for source in sources:
        if (kind := read_once(source)) is not None:
            raise UsageError(f"{source}: is {kind}, which cannot be read several times; give a file or a folder")


def _report(plain: Mapping[str, Any]) -> Report:
    tables = {name: TableReport.from_dict(table) for name, table in plain["tables"].items()}
    rates = None if plain["learning_rates"] is None else tuple(plain["learning_rates"])
    return Report(**{**plain, "tables": tables, "learning_rates": rates, "notes": tuple(plain["notes"])})


def _joined(reports: Sequence[Report], seconds: float) -> Report:
    """Return the report of the first pass, with the tables of all and the time of the whole replay."""
    first, joined, notes = reports[0], joined_counters(reports), list(reports[0].notes)
    if joined.not_finite > first.not_finite:
        of_first = not_finite_note(first.not_finite, first.first_not_finite)
        of_all = not_finite_note(joined.not_finite, joined.first_not_finite)
        notes = [*(note for note in notes if note != of_first), of_all]
    return replace(
        joined,
        notes=tuple(notes),
        seconds=seconds,
        rows_per_s=first.rows / seconds if seconds > 0 else 0.0,
        held_bytes=max(report.held_bytes for report in reports),
        tables=joined_tables([report.tables for report in reports]),
    )
