"""The core of an engine over several processes: each brings a frame to a round, and all decide alike.

A round is one call of every process, or one frame of each one's source. Its frames enter together: the gate counts
those of all processes, opens after the round that brings ``num_required``, and every process steps. Each sums its own
frames; the tables add the sums of the processes in the order of ranks (row_exchange.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from penstock.base.errors import PenstockError, UsageError
from penstock.base.threads import ThreadTeam
from penstock.core.engine_core import EngineCore
from penstock.core.observers import Context, Pushed, StepObserver
from penstock.core.pipeline import BadRowsError, Pipeline, TableStore
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import NO_FRAMES, Coalesced, Float32, Frame, FrameRun, Int64, SummedArrays
from penstock.model.gate_policy import GatePolicy
from penstock.model.learning_rates import LearningRates
from penstock.rows.bridge.mesh_selection import ProcessGroup
from penstock.rows.table_set import TableSet

T = TypeVar("T")

# What a process brings to a round.
NOTHING, FRAME, STALE = range(3)
Values = tuple[float, ...] | PenstockError  # the learning rates of a step, or why they are missing


class LockstepCore(EngineCore):
    """The core of an engine whose mesh spans processes: it observes, admits and opens alike in all of them."""

    pipeline: ProcessSums

    @property
    def processes(self) -> ProcessGroup:
        return self.pipeline.processes

    def observe(self, observer: StepObserver) -> None:
        if observer.needs_all_rows:
            raise UsageError(
                f"the tables span {self.processes.count} processes, which write neither commits nor deltas: save "
                "engine.table() and engine.slots() with Orbax (docs/scaling.md), or run a separate engine per process"
            )
        super().observe(observer)

    @contextmanager
    def still(self) -> Iterator[None]:
        with self.processes.sharing_errors(), super().still():
            yield

    def sharing_errors(self) -> AbstractContextManager[None]:
        return self.processes.sharing_errors()

    def rounds(self, frames: Iterator[T], context: Context) -> Iterator[T]:
        yield from frames
        while (values := self._round(NOTHING, None, context)) is not None:
            if self.gate.is_due():
                self.gate.change(self._open, values, context)

    def push(self, run: FrameRun, context: Context) -> Pushed:
        """Push the next frame of a run: every frame is part of a round."""
        with self.gate.still(), self.processes.sharing_errors():
            self.check_ready()
            frame = self.reduced(run.frame().audited())
            brings = STALE if self.gate.is_stale(frame.local_step) else FRAME
            if brings == FRAME:
                frame = self._checked(frame)
            values = self._round(brings, frame, context)
            assert values is not None  # this process has a frame
            with self._whole():
                pushed = self.gate.change(self._enter, FrameRun.of(frame), values, context)
            run.next += 1
            return pushed

    def open_early(self, context: Context) -> Pushed:
        with self.gate.still(), self.processes.sharing_errors():
            self.check_ready()
            opens = self.gate.num_accumulated > 0
            own = self._values(context.rates, self.pipeline.last_rates) if opens else ()
            bits = self.processes.agree("flush()", self._encoded(own))
            if not opens:
                return Pushed(NO_FRAMES, 0, 0, context)
            self.gate.check_may_open()
            return self.gate.change(self._open, self._agreed_rates(bits, own), context)

    def _round(self, brings: int, frame: Frame | None, context: Context) -> tuple[float, ...] | None:
        """Take part in a round, and count the frames of the other processes.

        Returns the learning rates of the step if the gate opens then; None if no process has a frame. The caller then
        admits this process's frame, and opens the gate if it is due.
        """
        may_open = self.gate.is_due(self.processes.count)
        own: Values = ()
        values: tuple[float, ...] = ()
        if brings == FRAME and frame is not None and may_open:
            own = self._values(context.rates, frame.learning_rates)
        heads = self.processes.agree("a round of frames", [brings, *self._encoded(own)])
        num_frames = int((heads[:, 0] == FRAME).sum())
        if self.gate.is_due(num_frames):
            self.gate.check_may_open()
            # Rates are those of the last process that brings a frame.
            values = self._agreed_rates(heads[heads[:, 0] == FRAME][:, 1:], own)
        self.gate.num_accumulated += num_frames - (brings == FRAME)
        return values if (heads[:, 0] != NOTHING).any() else None

    def _checked(self, frame: Frame) -> Frame:
        """Return a frame without bad rows: a round that has begun must not fail in one process."""
        try:
            self.pipeline.check(frame)
        except BadRowsError as error:
            return error.repaired(frame)
        return frame

    def _values(self, rates: LearningRates, of_frame: tuple[float, ...] | None) -> Values:
        try:
            return rates.at(self.global_step, of_frame)
        except PenstockError as error:
            return error

    def _encoded(self, values: Values) -> list[int]:
        """Return whether there are learning rates, and their bits."""
        tags = self.config.num_tags
        if isinstance(values, PenstockError) or len(values) != tags:
            return [0] * (1 + 2 * tags)
        return [1, *np.array(values, np.float64).view(np.int32).tolist()]

    def _agreed_rates(self, bits: Any, own: Values) -> tuple[float, ...]:
        """Return the rates of the last process that has them. bits : of each process, as ``_encoded`` returns them"""
        for rank_bits in bits[::-1]:
            if rank_bits[0]:
                return tuple(np.ascontiguousarray(rank_bits[1:]).view(np.float64).tolist())
        raise own if isinstance(own, PenstockError) else UsageError("learning_rates: no process gave any")


class ProcessSums(Pipeline):
    """The sums of this process, as the tables of all processes take them: the same tables everywhere, not divided.

    Tables that keep frames separate apply those of the first process, then those of the second, and so on.
    """

    def __init__(self, stores: Mapping[str, TableStore], team: ThreadTeam, processes: ProcessGroup, mean: bool) -> None:
        super().__init__(stores, team)
        self.processes, self._mean = processes, mean

    def drain(self) -> dict[str, list[Coalesced]]:
        separate = [name for name, store in self.stores.items() if not store.accumulates]
        frames = {name: self._drained(store) for name, store in self.stores.items()}
        if separate:
            counts = self.processes.agree("a step of separate frames", [len(frames[name]) for name in separate])
            for name, of_ranks in zip(separate, counts.T.tolist(), strict=True):
                nothing, own, rank = self._no_rows(self.stores[name]), frames[name], self.processes.rank
                before, after = sum(of_ranks[:rank]), sum(of_ranks[rank + 1 :])
                frames[name] = [nothing] * before + own + [nothing] * after
        return frames

    def _drained(self, store: TableStore) -> list[Coalesced]:
        if not store.accumulates:
            return [self._summed(frame.parts) for frame in store.drain()]
        if not len(store.accumulator):
            return [self._no_rows(store)]
        counts = store.accumulator.counts() if self._mean else None
        return [self._summed(Coalesced(store.accumulator.drain()).parts, counts)]

    def _no_rows(self, store: TableStore) -> Coalesced:
        return self._summed(Coalesced.of_no_rows(store.accumulator.dim).parts)

    def _summed(self, parts: Sequence[tuple[Int64, Float32]], counts: Int64 | None = None) -> Coalesced:
        """Return sums with the number of frames that contain each id, if the tables divide by it.

        counts : of the ids of all parts; None: 1 each
        """
        ends = np.cumsum([len(ids) for ids, _ in parts])
        counts = np.ones(ends[-1], np.int64) if counts is None else counts
        frames = np.split(counts, ends[:-1]) if self._mean else [None] * len(parts)
        return Coalesced(tuple(SummedArrays(*part, frames=count) for part, count in zip(parts, frames, strict=True)))


def create_core(
    config: EmbeddingConfig,
    tables: TableSet,
    stores: Mapping[str, TableStore],
    policy: GatePolicy,
    reduction: str,
    seed: int,
    team: ThreadTeam,
) -> LockstepCore:
    """Return the core of an engine that spans processes, after all have created an equal one."""
    processes: ProcessGroup | None = tables.processes
    assert processes is not None
    if policy.workers is not None:
        raise UsageError(
            "the processes of a mesh have rounds of their own, one frame of each: leave out workers (docs/scaling.md)"
        )
    pipeline = ProcessSums(stores, team, processes, reduction == "mean")
    core = LockstepCore(config, tables, pipeline, policy, reduction, seed)
    same = config.to_engine_proto().SerializeToString(deterministic=True)
    digest = hashlib.sha256(same + repr((policy, reduction, seed)).encode()).hexdigest()
    processes.agree(f"Engine(…), configuration and arguments {digest[:12]}")
    return core
