"""The core of an engine over several processes: each brings a frame to a round, and all decide alike.

A round is one call of every process, or one frame of each one's source. Its frames enter together: the gate counts
those of all processes, opens after the round that brings ``num_required``, and every process steps. Each sums its own
frames; the tables add the sums of the processes in the order of ranks (``bridge/processes``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from penstock.config.embedding import EmbeddingConfig
from penstock.core import EngineCore, StepObserver
from penstock.errors import PenstockError, UsageError
from penstock.frames import Coalesced, Float32, Frame, Int64, SummedArrays
from penstock.learning_rates import LearningRates, Rates
from penstock.pipeline import Pipeline, TableStore
from penstock.stats import Counters
from penstock.tables.table_set import TableSet

# What a process brings to a round.
NOTHING, FRAME, STALE = range(3)
Values = tuple[float, ...] | PenstockError  # the learning rates of a step, or why they are missing


class LockstepCore(EngineCore):
    """The core of an engine whose mesh spans processes. Arguments and attributes as for EngineCore."""

    def __init__(
        self,
        config: EmbeddingConfig,
        tables: TableSet,
        num_required: int | None = None,
        reduction: str = "mean",
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__(config, tables, num_required, reduction, seed, threads)
        assert tables.processes is not None
        self._processes = tables.processes
        self.pipeline = _Sums(config, tables, reduction == "mean", threads)
        same = config.to_engine_proto().SerializeToString(deterministic=True)
        made_of = hashlib.sha256(same + repr((self.gate.num_required, reduction, seed)).encode()).hexdigest()
        self._processes.agree(f"Engine(…), configuration and arguments {made_of[:12]}")

    def observe(self, observer: StepObserver) -> None:
        if observer.needs_all_rows:
            raise UsageError(
                f"the tables span {self._processes.count} processes, which write neither commits nor deltas: save "
                "engine.table() and engine.slots() with Orbax (docs/meshes.md), or run a separate engine per process"
            )
        super().observe(observer)

    @contextmanager
    def still(self) -> Iterator[None]:
        with self._processes.sharing_errors(), super().still():
            yield

    @contextmanager
    def in_lockstep(
        self, frames: Iterable[Any] | None = None, rates: LearningRates | None = None, counters: Counters | None = None
    ) -> Iterator[Iterator[Any]]:
        with self._processes.sharing_errors():
            yield self._rounds(frames or (), rates or self.rates, counters or self.counters)

    def _rounds(self, frames: Iterable[Any], rates: LearningRates, counters: Counters) -> Iterator[Any]:
        """Yield the frames of this process, each of which the caller pushes, and end with the last process."""
        yield from frames
        while self._enter(NOTHING, None, rates, counters):
            if self.gate.is_due():
                with self._whole():
                    self.gate.open_early()

    def push(self, frame: Frame, rates: LearningRates, counters: Counters) -> tuple[Frame, bool]:
        with self.gate.still(), self._processes.sharing_errors():
            self.check_ready()
            frame = frame.audited()
            brings = STALE if self.gate.is_stale(frame.local_step) else FRAME
            self._enter(brings, frame, rates, counters)
            with self._whole():
                admitted = self.gate.admit(
                    frame.local_step, partial(self.pipeline.add, frame, lambda: None), frame.contributor
                )
                counters.count(frame, admitted)
                for observer in self.observers:
                    observer.frame_applied(frame, admitted, counters)
            return frame, admitted

    def take_in(self, frame: Frame, learning_rates: Rates) -> bool:
        with self._processes.sharing_errors():
            return super().take_in(frame, learning_rates)

    def open_early(self, rates: LearningRates, counters: Counters) -> bool:
        with self.gate.still(), self._processes.sharing_errors():
            self.check_ready()
            opens = self.gate.num_accumulated > 0
            own = self._values(rates, self.pipeline.last_rates) if opens else ()
            bits = self._processes.agree("flush()", self._encoded(own))
            if not opens:
                return False
            self.gate.check_may_open()
            self._opening = self._agreed_rates(bits, own), counters
            with self._whole():
                return self.gate.open_early()

    def _enter(self, brings: int, frame: Frame | None, rates: LearningRates, counters: Counters) -> bool:
        """Take part in a round, and count the frames of the other processes. Returns False if no process has a frame.

        The caller then admits this process's frame, and opens the gate if it is due.
        """
        may_open = self.gate.is_due(self._processes.count)
        own: Values = ()
        if brings == FRAME and frame is not None and may_open:
            own = self._values(rates, frame.learning_rates)
        heads = self._processes.agree("a round of frames", [brings, *self._encoded(own)])
        num_frames = int((heads[:, 0] == FRAME).sum())
        if self.gate.is_due(num_frames):
            self.gate.check_may_open()
            # Rates are those of the last process that brings a frame.
            self._opening = self._agreed_rates(heads[heads[:, 0] == FRAME][:, 1:], own), counters
        self.gate.num_accumulated += num_frames - (brings == FRAME)
        return bool((heads[:, 0] != NOTHING).any())

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


class _Sums(Pipeline):
    """The sums of this process, as the tables of all processes take them: the same tables everywhere, not divided.

    Tables that keep frames separate apply those of the first process, then those of the second, and so on.
    """

    def __init__(self, config: EmbeddingConfig, tables: TableSet, mean: bool, threads: int | None) -> None:
        stores = {
            spec.name: TableStore(
                spec.vocabulary_size, spec.dim, accumulate=spec.accumulate, mean=False, count_frames=mean
            )
            for spec in config.tables
        }
        super().__init__(stores, threads)
        assert tables.processes is not None
        self._processes, self._mean = tables.processes, mean
        self._of_no_rows = {spec.name: self._of([Coalesced.of_no_rows(spec.dim).parts[0]]) for spec in config.tables}

    def drain(self) -> dict[str, list[Coalesced]]:
        separate = [name for name, store in self.stores.items() if not store.accumulates]
        frames = {name: self._drained(name, store) for name, store in self.stores.items()}
        if separate:
            counts = self._processes.agree("a step of separate frames", [len(frames[name]) for name in separate])
            for name, of_ranks in zip(separate, counts.T.tolist(), strict=True):
                nothing, own, rank = self._of_no_rows[name], frames[name], self._processes.rank
                before, after = sum(of_ranks[:rank]), sum(of_ranks[rank + 1 :])
                frames[name] = [nothing] * before + own + [nothing] * after
        return frames

    def _drained(self, name: str, store: TableStore) -> list[Coalesced]:
        if not store.accumulates:
            return [self._of(frame.parts) for frame in store.drain()]
        counts = store.accumulator.counts() if self._mean else None
        return [self._of(frame.parts, counts) for frame in store.drain()] or [self._of_no_rows[name]]

    def _of(self, parts: Sequence[tuple[Int64, Float32]], counts: Int64 | None = None) -> Coalesced:
        """Return sums with the number of frames that contain each id, if the tables divide by it.

        counts : of the ids of all parts; None: 1 each
        """
        ends = np.cumsum([len(ids) for ids, _ in parts])
        counts = np.ones(ends[-1], np.int64) if counts is None else counts
        frames = np.split(counts, ends[:-1]) if self._mean else [None] * len(parts)
        return Coalesced(tuple(SummedArrays(*part, frames=count) for part, count in zip(parts, frames, strict=True)))


def core_of(tables: TableSet) -> type[EngineCore]:
    """Return the class of the core of these tables."""
    return EngineCore if tables.processes is None else LockstepCore
