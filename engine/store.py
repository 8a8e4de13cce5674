"""What one table holds behind the gate: its coalesced rows since the last opening.

Two ways, as the table's gradient_accumulation_status says. On: everything is summed into one
accumulator. Off: every frame is coalesced by itself and applied by itself, in arrival order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.frames import Coalesced, Rows
from penstock.pyx.accumulator import Accumulator

Array = npt.NDArray[Any]
Task = Callable[[], bool]


class TableStore:
    """One table's side of the gate. dim : floats per row; mean : divide by frames at the opening.

    is_share : other processes hold other rows of the table; where frames are not accumulated, one that has no row here
        is kept all the same, so that the frames held have the same numbers everywhere

    A frame comes in by ``begin``, then every one of its tasks, then ``end``; or ``undo`` where a task said no.
    Tasks may run on threads of their own.
    """

    def __init__(self, vocabulary_size: int, dim: int, *, accumulate: bool, mean: bool, is_share: bool = False) -> None:
        self.dim = dim
        self._accumulate = accumulate
        self._mean = mean and accumulate
        self._accumulator = Accumulator(dim, vocabulary_size=vocabulary_size, count=self._mean)
        self._whole: list[Coalesced] = []  # frames done, where they are not accumulated
        nothing = Coalesced(((np.zeros(0, np.int64), np.zeros((0, dim), np.float32)),))
        self._of_no_rows = [nothing] if is_share else []
        self._rows_begun = 0
        self.num_rows = 0

    def begin(self, blocks: Sequence[Rows], frame: int, num_parts: int) -> list[Task]:
        """Make room for a frame's rows. The tasks add them; one returns False where it met a bad row.

        frame : its number; num_parts : a power of two, how many tasks are wanted
        Raises MemoryError: then nothing has changed.
        """
        given = [(block.ids, block.grads, block.which, block.gains) for block in blocks]
        parts = self._accumulator.begin(given, frame, num_parts)
        self._rows_begun = sum(len(block.ids) for block in blocks)
        return [partial(self._accumulator.add_part, part, frame, True) for part in range(parts)]

    def checks(self, num_parts: int) -> list[Task]:
        """Tasks that look through the rows begun and add nothing: False where one is bad."""
        return [partial(self._accumulator.check_part, part, num_parts) for part in range(num_parts)]

    def end(self) -> None:
        """The frame is in."""
        self._accumulator.end()
        self.num_rows += self._rows_begun
        if not self._accumulate:
            self._whole += self._drained() or self._of_no_rows

    def cancel(self) -> None:
        """The frame that was begun will not come."""
        self._accumulator.end()

    def undo(self) -> None:
        """Take the frame back, however much of it was added. Only where the store was ``vacant``."""
        self._accumulator.undo()

    @property
    def vacant(self) -> bool:
        """Whether a frame that comes now can be taken back."""
        return len(self._accumulator) == 0

    def drain(self) -> list[Coalesced]:
        """What has been summed: one, or one per frame where accumulation is off; empty ones left out."""
        whole, self._whole = self._whole, []
        return whole or self._drained()

    def _drained(self) -> list[Coalesced]:
        if self.vacant:
            return []
        return [Coalesced(tuple(self._accumulator.drain_parts(self._mean)))]

    @property
    def num_distinct(self) -> int:
        """Distinct ids that have entered the gate since ``start_counting``, those still held included."""
        return self._accumulator.num_distinct

    @property
    def nbytes(self) -> int:
        """Bytes held behind the gate."""
        held = self._accumulator.nbytes
        for frame in self._whole:
            held += sum(ids.nbytes + sums.nbytes for ids, sums in frame.parts)
        return held

    def start_counting(self) -> None:
        """Forget the counts of the run before. What is held from then counts again only where it comes again."""
        self.num_rows = 0
        self._accumulator.start_counting()

    def get_state(self) -> dict[str, Array]:
        """What is held, as arrays that are copies: ``0.ids``, ``0.sums``, … and for several frames ``1.ids``, …"""
        if self._accumulate:
            states = [] if self.vacant else [self._accumulator.get_state()]
        else:
            states = [_joined(frame) for frame in self._whole]
        return {f"{number}.{key}": array for number, held in enumerate(states) for key, array in held.items()}

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Take up what ``get_state`` gave; what is held now is dropped. Counts of runs are not part of it."""
        num_held = 1 + max((int(key.partition(".")[0]) for key in state), default=-1)
        self.drain()
        for number in range(num_held):
            held = {key.partition(".")[2]: array for key, array in state.items() if key.startswith(f"{number}.")}
            if self._accumulate:
                self._accumulator.set_state(held)
            else:
                self._whole.append(Coalesced(((held["ids"], held["sums"]),)))
        self.start_counting()


def _joined(frame: Coalesced) -> dict[str, Array]:
    ids, sums = (np.concatenate([part[of] for part in frame.parts]) for of in range(2))
    return {"ids": ids, "sums": sums}
