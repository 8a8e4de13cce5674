"""What one table holds behind the gate: its coalesced rows since the last opening.

Two ways, as the table's gradient_accumulation_status says. On: everything is summed into one
accumulator. Off: every frame is coalesced by itself and applied by itself, in arrival order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.frames import Coalesced, Rows
from penstock.pyx.accumulator import Accumulator

# Below this many rows a second thread costs more than it saves.
ROWS_WORTH_SPLITTING = 1 << 15

Run = Callable[[Iterable[Callable[[], None]]], None]


def run_in(executor: Executor | None) -> Run:
    """Run tasks on an executor's threads, or here; an error of one is raised when all are done."""

    def run(tasks: Iterable[Callable[[], None]]) -> None:
        if executor is None:
            for task in tasks:
                task()
        else:
            for done in [executor.submit(task) for task in tasks]:
                done.result()

    return run


class TableStore:
    """One table's side of the gate. dim : floats per row; mean : divide by frames at the opening."""

    def __init__(self, vocabulary_size: int, dim: int, *, accumulate: bool, mean: bool) -> None:
        self.dim = dim
        self._accumulate = accumulate
        self._mean = mean and accumulate
        self._frames: list[Accumulator] = []
        self._seen = np.zeros(vocabulary_size, bool)  # lazily backed by memory, one byte per touched row
        self._last_frame = self._counted_from = -1  # numbers of frames
        self.num_rows = 0

    def add(self, blocks: Sequence[Rows], frame: int, threads: int, run: Run) -> None:
        """Coalesce one frame's rows. frame : its number; threads : how many parts the sums may be split into."""
        if not self._accumulate or not self._frames:
            self._frames.append(Accumulator(self.dim))
        accumulator = self._frames[-1]
        self._last_frame = frame
        for block in blocks:
            order = accumulator.resolve(block.ids, frame)
            parts = min(threads, len(block.ids) // ROWS_WORTH_SPLITTING)
            if parts <= 1:
                accumulator.fold(order, block.grads)
            else:
                run(partial(accumulator.fold, order, block.grads, part, parts) for part in range(parts))
            self.num_rows += len(block.ids)

    def drain(self) -> list[Coalesced]:
        """What has been summed: one, or one per frame where accumulation is off; empty ones left out."""
        drained = []
        for accumulator in self._frames:
            self._seen[self._counted(accumulator)] = True
            ids, sums, _ = accumulator.drain(self._mean)
            if len(ids):
                drained.append(Coalesced(ids, sums))
        # The accumulator is kept: its hash table has the size that this stream needs.
        self._frames = self._frames[:1] if self._accumulate else []
        return drained

    @property
    def num_distinct(self) -> int:
        """Distinct ids that have entered the gate since ``start_counting``, those still held included."""
        held = [self._counted(accumulator) for accumulator in self._frames]
        waiting = np.unique(np.concatenate(held)) if held else np.zeros(0, np.int64)
        return int(np.count_nonzero(self._seen)) + int(np.count_nonzero(~self._seen[waiting]))

    @property
    def nbytes(self) -> int:
        """Bytes held behind the gate."""
        return sum(accumulator.nbytes for accumulator in self._frames)

    def _counted(self, accumulator: Accumulator) -> npt.NDArray[np.int64]:
        """The ids held that occurred since ``start_counting``."""
        ids, frames = accumulator.held()
        return ids[frames > self._counted_from]

    def start_counting(self) -> None:
        """Forget the counts of the run before. What is held from then counts again only where it comes again."""
        self._counted_from = self._last_frame
        self.num_rows = 0
        self._seen = np.zeros_like(self._seen)

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """What is held, as arrays that are copies: ``last_frame``, and ``0.ids``, ``0.sums``, … per accumulator."""
        states = [accumulator.get_state() for accumulator in self._frames]
        state = {f"{number}.{key}": array for number, held in enumerate(states) for key, array in held.items()}
        return {"last_frame": np.array(self._last_frame), **state}

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take up what ``get_state`` gave; what is held now is dropped. Counts of runs are not part of it."""
        num_held = 1 + max((int(key.partition(".")[0]) for key in state if key != "last_frame"), default=-1)
        self._frames = [Accumulator(self.dim) for _ in range(num_held)]
        for number, accumulator in enumerate(self._frames):
            accumulator.set_state({key: state[f"{number}.{key}"] for key in ("ids", "sums", "counts", "frames")})
        self._last_frame = int(state["last_frame"])
        self.start_counting()
