"""Owners of a job: each holds a share of the rows, and applies the blocks that readers have routed to it."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.api.deltas import Deltas
from penstock.api.engine import Engine
from penstock.base.errors import ConfigError, PenstockError, UsageError
from penstock.checkpoint.store import Commit, Folder
from penstock.contrib.ray.readers import Place
from penstock.contrib.shares import frames_of
from penstock.core.engine_core import EngineCore
from penstock.core.observers import Context
from penstock.core.telemetry import MetricsSnapshot
from penstock.model.command_options import JobOptions
from penstock.model.frames import Float32, Frame, FrameRun, Int64
from penstock.model.learning_rates import LearningRates
from penstock.model.options import DeltaOptions
from penstock.model.stats import Counters, TableReport
from penstock.rows.state_hash import KeyArrays


@dataclass(frozen=True)
class Begun:
    """The state that an owner begins with.

    num_frames : frames that it contains; positions : in the sources, plain data; None: at their start
    """

    global_step: int
    changed_step: int
    num_frames: int
    positions: Mapping[str, Any] | None


@dataclass
class Applied:
    """What an owner reports of a block.

    num_frames : frames applied, stale ones included; error : raised by the next one
    deltas : of every delta that has become due the global step, and its batches
    """

    num_frames: int = 0
    error: BaseException | None = None
    global_step: int = 0
    num_accumulated: int = 0
    counters: dict[str, Any] = field(default_factory=dict)
    deltas: list[tuple[int, list[pa.RecordBatch]]] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """The counts of an owner at the end.

    last_rates : of every tag at the last step; variants, problems : of its programs (``TablePrograms``)
    """

    tables: Mapping[str, TableReport]
    last_rates: tuple[float, ...] | None
    variants: Mapping[str, str]
    problems: Sequence[str]


class Owner:
    """One share of a job.

    seed : of the rows, of a commit if there is one
    samples : whether snapshots have moments and hot ids; None: none are wanted
    """

    def __init__(self, options: JobOptions, rank: int, seed: int, samples: bool | None) -> None:
        self._options, self._share, self._seed, self._samples = options, (rank, options.shares), seed, samples
        config = options.config
        self._rates = LearningRates(config.num_tags, options.learning_rates, config.schedules)
        self._dims = {spec.name: spec.dim for spec in config.tables}

    def begin(self, folder: str | None) -> Begun:
        """Create the engine anew: from the newest commit of a folder, or from the start."""
        options, share = self._options, self._share
        gate = {name: getattr(options, name) for name in ("num_required", "reduction", "threads")}
        for held in ("_engine", "_metrics", "_deltas"):  # their memory is free before the next ones take some
            vars(self).pop(held, None)
        self._check_devices()
        if folder is None:
            engine = Engine(options.config, share=share, seed=self._seed, **gate)
            if options.init is not None:
                engine.read_tables(options.init, learning_rates=options.learning_rates)
        else:
            engine = Engine.restore(folder, config=options.config, share=share, **gate)
        self._engine, core = engine, engine.core
        self._error: BaseException | None = None
        self._counters = Counters()
        core.start_counting()
        core.rates = self._rates
        engine.session.ledger.count_into(self._counters)
        engine.watch.counters = self._counters
        if self._samples is not None:
            from penstock.contrib.pages.metrics import Metrics  # needs the extra metrics

            self._metrics = Metrics(engine)
        if self._samples:
            engine.watch.look_closer()
        self._deltas = None if options.deltas is None else Deltas(core, DeltaOptions.among(vars(options)))
        positions = None if folder is None else engine.session.positions.get_state()
        return Begun(core.global_step, core.changed_step, engine.session.ledger.totals.frames, positions)

    def apply(self, stop: Place | None, flush: bool, *parts: Any) -> Applied:
        """Apply the frames of a block in the order of their places, as far as ``stop``; none after an error.

        parts : of every reader the heads with their places, then of every reader the batch of this share
        flush : open the gate for the frames that it holds, at the end
        """
        core, watch, done = self._core, self._engine.watch, Applied(error=self._error)
        context = Context(self._rates, self._counters)
        try:
            for place, frame in self._frames(parts):
                if self._error is not None or (stop is not None and place >= stop):
                    break
                with watch.timed("sum"):
                    pushed = core.push(FrameRun.of(frame), context).check()
                watch.sample(pushed, core.gate, core.last_rates or ())
                done.num_frames += 1
                if self._deltas is not None:
                    self._collect(self._deltas.due(), done)
            if flush and self._error is None:
                core.open_early(context)
                if self._deltas is not None:
                    self._collect(self._deltas.rest(), done)
            core.wait()
        except (PenstockError, MemoryError) as error:
            self._error = done.error = error
        done.global_step, done.num_accumulated = core.global_step, core.gate.num_accumulated
        done.counters = self._counters.get_state()
        return done

    def write_part(self, folder: str, number: int, attempt: str) -> Commit:
        """Write this share's part of a commit. folder : its address; attempt : of ``CheckpointSession.write_part``"""
        with self._engine.watch.timed("save"):
            return self._engine.session.write_part(Folder(folder), number, attempt)

    def snapshot(self) -> MetricsSnapshot:
        """Return the numbers of this share after the last block."""
        return self._metrics.snapshot()

    def end(self) -> Ended:
        core, programs = self._core, self._core.tables.programs
        return Ended(core.table_reports(), core.last_rates, programs.variants, programs.problems)

    # ---- tables, between two blocks

    def rows_in_hash_order(self, name: str) -> tuple[Int64, KeyArrays]:
        """Return ``TableSet.rows_in_hash_order``."""
        return self._core.tables.rows_in_hash_order(name)

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32:
        """Return ``TableSet.read_rows``."""
        return self._core.tables.read_rows(name, part, rows)

    # ---- internal

    def _check_devices(self) -> None:
        """Raise ConfigError unless jax runs on one accelerator, as requested, or by JAX_PLATFORMS on a CPU."""
        if self._options.accelerator is None:
            return
        from penstock.rows.bridge.mesh_selection import default_mesh

        name = self._options.accelerator.upper()
        try:
            devices = list(default_mesh().devices.flat)
        except UsageError as error:
            raise ConfigError(f"share {self._share[0]}: expected one {name}: {error}") from error
        platforms = {device.platform for device in devices}
        chips = {str(getattr(device, "coords", device.id)) for device in devices}  # a TPU chip may have two devices
        by_request = platforms == {"cpu"} and os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
        if not by_request and (platforms != {self._options.accelerator} or len(chips) != 1):
            names = ", ".join(sorted(platforms))
            raise ConfigError(
                f"share {self._share[0]}: expected one {name}, and jax has {len(devices)} devices of platform {names} "
                f"there; install jax for {name}s on all nodes, and let Ray set the variables of visible devices"
            )

    @property
    def _core(self) -> EngineCore:
        return self._engine.core

    def _frames(self, parts: Sequence[Any]) -> Iterator[tuple[Place, Frame]]:
        readers = len(parts) // 2
        streams = []
        for placed, batch in zip(parts[:readers], parts[readers:], strict=True):
            frames = frames_of([head for _, head in placed], batch, self._dims)
            streams.append(zip((place for place, _ in placed), frames, strict=True))
        return heapq.merge(*streams, key=lambda frame: frame[0])

    def _collect(self, batches: Iterator[pa.RecordBatch], done: Applied) -> None:
        deltas = list(batches)
        if deltas:
            done.deltas.append((self._core.global_step, deltas))
