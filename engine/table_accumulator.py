"""What one table holds behind the gate: its coalesced rows since the last opening.

Two ways, as the table's gradient_accumulation_status says. On: everything is summed into one
accumulator. Off: every frame is coalesced by itself and applied by itself, in arrival order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.frames import Coalesced, SummedArrays
from penstock.pyx.accumulator import Accumulator

Array = npt.NDArray[Any]


class TableStore:
    """One table's side of the gate. dim : floats per row; mean : divide by frames at the opening.

    is_share : other processes hold other rows of the table; where frames are not accumulated, one that has no row here
        is kept all the same, so that the frames held have the same numbers everywhere

    accumulator : takes a frame's rows in (``pyx.intake``); ``end`` follows it
    """

    def __init__(self, vocabulary_size: int, dim: int, *, accumulate: bool, mean: bool, is_share: bool = False) -> None:
        self.dim, self.accumulates = dim, accumulate
        self._mean = mean and accumulate
        self.accumulator = Accumulator(dim, vocabulary_size=vocabulary_size, count=self._mean)
        self._whole: list[Coalesced] = []  # frames done, where they are not accumulated
        nothing = Coalesced((SummedArrays(np.zeros(0, np.int64), np.zeros((0, dim), np.float32)),))
        self._of_no_rows = [nothing] if is_share else []

    def end(self) -> None:
        """A frame is in."""
        if not self.accumulates:
            self._whole += self._drained() or self._of_no_rows

    @property
    def vacant(self) -> bool:
        """Whether a frame that comes now can be taken back."""
        return len(self.accumulator) == 0

    def drain(self) -> list[Coalesced]:
        """What has been summed: one, or one per frame where accumulation is off; empty ones left out."""
        if self.accumulates:
            return self._drained()
        whole, self._whole = self._whole, []
        return whole

    def _drained(self) -> list[Coalesced]:
        return [Coalesced(self.accumulator.drain(self._mean))] if len(self.accumulator) else []

    @property
    def num_rows(self) -> int:
        """Gradient rows that have entered since ``start_counting``."""
        return self.accumulator.num_rows

    @property
    def num_distinct(self) -> int:
        """Distinct ids that have entered the gate since ``start_counting``, those still held included."""
        return self.accumulator.num_distinct

    @property
    def nbytes(self) -> int:
        """Bytes held behind the gate."""
        return self.accumulator.nbytes + self.nbytes_apart

    @property
    def nbytes_apart(self) -> int:
        """Of these, those of whole frames, where they are not accumulated."""
        return sum([summed.nbytes for frame in self._whole for summed in frame.summed])

    def start_counting(self) -> None:
        """Forget the counts of the run before. What is held from then counts again only where it comes again."""
        self.accumulator.start_counting()

    def get_state(self) -> dict[str, Array]:
        """What is held, as arrays that are copies: ``0.ids``, ``0.sums``, … and for several frames ``1.ids``, …"""
        if self.accumulates:
            states = [] if self.vacant else [self.accumulator.get_state()]
        else:
            states = [_joined(frame) for frame in self._whole]
        return {f"{number}.{key}": array for number, held in enumerate(states) for key, array in held.items()}

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Take up what ``get_state`` gave; what is held now is dropped. Counts of runs are not part of it."""
        num_held = 1 + max((int(key.partition(".")[0]) for key in state), default=-1)
        self.drain()
        for number in range(num_held):
            held = {key.partition(".")[2]: array for key, array in state.items() if key.startswith(f"{number}.")}
            if self.accumulates:
                self.accumulator.set_state(held)
            else:
                self._whole.append(Coalesced((SummedArrays(held["ids"], held["sums"]),)))
        self.start_counting()


def _joined(frame: Coalesced) -> dict[str, Array]:
    ids, sums = (np.concatenate([part[of] for part in frame.parts]) for of in range(2))
    return {"ids": ids, "sums": sums}
