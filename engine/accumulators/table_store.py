"""The gradients of one table behind the gate, coalesced since the last opening.

The table's gradient_accumulation_status selects one of two ways. On: all frames are summed in one accumulator. Off:
every frame is coalesced and applied separately, in arrival order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.frames import Array, Coalesced, SummedArrays
from penstock.pyx.accumulator import Accumulator


class TableStore:
    """The accumulated gradients of one table.

    dim : floats per row; mean : divide sums by the number of frames at the opening
    accumulate : sum all frames; False: keep them separate
    is_share : other processes own other rows of the table; separate frames are then kept even without a row here, so
        that the buffered frames have the same numbers in every process

    accumulator : sums a frame's rows (``pyx.frame_accumulate``), after which ``end`` must follow. It counts the rows
        and distinct ids, buffered ones included, that have entered since its ``start_counting``
    """

    def __init__(self, vocabulary_size: int, dim: int, *, accumulate: bool, mean: bool, is_share: bool = False) -> None:
        self.accumulates = accumulate
        self._mean = mean and accumulate
        self.accumulator = Accumulator(dim, vocabulary_size=vocabulary_size, count=self._mean)
        self._whole: list[Coalesced] = []  # complete frames, if they are kept separate
        self._of_no_rows = [Coalesced.of_no_rows(dim)] if is_share else []

    def end(self) -> None:
        """End a frame: if frames are kept separate, drain it into the list of complete frames."""
        if not self.accumulates:
            self._whole += [Coalesced(self.accumulator.drain())] if len(self.accumulator) else self._of_no_rows

    def drain(self) -> list[Coalesced]:
        """Return and reset the sums: one Coalesced, or one per frame if accumulation is off; none if empty."""
        if self.accumulates:
            return [Coalesced(self.accumulator.drain(self._mean))] if len(self.accumulator) else []
        whole, self._whole = self._whole, []
        return whole

    @property
    def nbytes_apart(self) -> int:
        """Bytes of complete frames that are kept separate."""
        return sum([summed.nbytes for frame in self._whole for summed in frame.summed])

    def get_state(self) -> dict[str, Array]:
        """Return copies of the buffered sums as arrays: ``0.ids``, ``0.sums``, … and for several frames ``1.ids``, …"""
        if self.accumulates:
            states = [self.accumulator.get_state()] if len(self.accumulator) else []
        else:
            states = [_joined(frame) for frame in self._whole]
        return {f"{number}.{key}": array for number, held in enumerate(states) for key, array in held.items()}

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Replace the buffered sums by those that ``get_state`` returned, and reset the counts of the run."""
        num_held = 1 + max((int(key.partition(".")[0]) for key in state), default=-1)
        self.drain()
        for number in range(num_held):
            held = {key.partition(".")[2]: array for key, array in state.items() if key.startswith(f"{number}.")}
            if self.accumulates:
                self.accumulator.set_state(held)
            else:
                self._whole.append(Coalesced((SummedArrays(held["ids"], held["sums"]),)))
        self.accumulator.start_counting()


def _joined(frame: Coalesced) -> dict[str, Array]:
    ids, sums = (np.concatenate([part[of] for part in frame.parts]) for of in range(2))
    return {"ids": ids, "sums": sums}
