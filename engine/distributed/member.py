"""One process's engine of several over the same tables.

Everything that reads gradients or looks at whole tables is in lockstep: every process calls the same methods with the
same arguments, in the same order. The frames, the gate, the steps and the report are the same everywhere; sums, rows
and the optimizer's work are each process's own share.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.checkpoint.engine_state import restore
from penstock.checkpoint.session import CheckpointSession
from penstock.config.embedding import EmbeddingConfig
from penstock.core import EngineCore
from penstock.deltas import DeltaOptions, Deltas
from penstock.distributed.commits import SharedCheckpointSession
from penstock.distributed.deltas import SharedDeltas
from penstock.distributed.peers import Peers
from penstock.distributed.rounds import RoundsReader
from penstock.distributed.tables import SharedState
from penstock.distributed.telling import Telling
from penstock.engine import Engine
from penstock.errors import PenstockError, UsageError
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.learning_rates import LearningRates
from penstock.stats import Counters, ProcessReport, Report, summed
from penstock.tables.table_set import TableSet, Variant
from penstock.telemetry import Telemetry

if TYPE_CHECKING:
    import jax


class Member(Engine):
    """An Engine whose tables are shared with the other processes of a job.

    peers : the job; mesh : of devices of this process. The other arguments are Engine's, the same everywhere.
    """

    core: SharedCore
    session: SharedCheckpointSession

    def __init__(
        self,
        peers: Peers,
        config: EmbeddingConfig,
        mesh: jax.sharding.Mesh | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
        seed: int = 0,
        threads: int | None = None,
        variant: Variant = "auto",
    ) -> None:
        self._peers = peers
        super().__init__(config, mesh, num_required, reduction, seed, threads, variant)
        self._telling = self.core.telling = Telling(self.core, self.watch, peers)

    @classmethod
    def restored(
        cls,
        peers: Peers,
        path: str | os.PathLike[str],
        mesh: jax.sharding.Mesh | None = None,
        threads: int | None = None,
        *,
        config: EmbeddingConfig | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
    ) -> Member:
        """``Engine.restore``: from a commit of any number of processes."""
        return restore(partial(cls, peers), path, config, mesh, threads, num_required, reduction)

    def run(self, source: Any, **arguments: Any) -> Report:
        """``Engine.run`` of the sources of all processes, a frame of each in turn. The report is of the whole job."""
        report = super().run(source, **arguments)
        for rank, told in enumerate(self._peers.gather("the report", self._telling.told())):
            if rank != self._peers.rank:
                self._telling.heard(rank, told)
        processes = self.processes
        held_bytes = sum(process.held_bytes for process in processes)
        return replace(report, tables=summed(processes)[0], held_bytes=held_bytes, processes=processes)

    @property
    def processes(self) -> tuple[ProcessReport, ...]:
        return self._telling.all

    def apply(self, *_: Any, **__: Any) -> NoReturn:
        self.core.take_in()

    # ---- inside

    def _make_tables(self, mesh: jax.sharding.Mesh | None, threads: int) -> TableSet:
        self._shared = SharedState(self.config, mesh, self.seed, threads, self._peers, self.variant)
        return self._shared

    def _make_core(self, tables: TableSet, num_required: int | None, threads: int | None) -> EngineCore:
        core = SharedCore(self.config, tables, num_required, self.reduction, self.seed, threads)
        core.peers = self._peers
        return core

    def _make_telemetry(self) -> Telemetry:
        """Samples the rows that are here."""
        return Telemetry(
            lambda name, numbers: self._shared.here(name).read(numbers),
            known_as=lambda name, numbers: self._shared.shares[name].ids(numbers),
        )

    def _make_session(self) -> CheckpointSession:
        return SharedCheckpointSession(self.core, self._peers, self._shared.shares, partial(self.watch.timed, "save"))

    def _make_deltas(self, options: DeltaOptions) -> Deltas:
        return SharedDeltas(self.core, self._peers, self._shared, options)

    def _open_reader(self, source: Any, options: ReadOptions) -> FrameReader:
        return RoundsReader(self._peers, self._shared.shares, source, options, self.session, self._telling)


class SharedCore(EngineCore):
    """The core of an engine that is one of several."""

    peers: Peers
    telling: Telling

    def push(self, frame: Frame, rates: LearningRates, counters: Counters) -> tuple[Frame, bool]:
        try:
            taken = super().push(frame, rates, counters)
        except PenstockError as error:  # of the frame or the rates: everybody meets it here
            self.peers.agreed = error
            raise
        self.telling.took(taken[0])
        return taken

    def take_in(self, *_: Any) -> NoReturn:
        """Frames of several processes need an order, which rounds give them."""
        raise UsageError("apply: an engine of several processes takes frames in rounds only: use run")

    def start_counting(self) -> None:
        super().start_counting()
        self.telling.begin()
