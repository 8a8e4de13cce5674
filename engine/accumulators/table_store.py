"""The sums of one table between two openings of an engine's gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.frames import Array, Coalesced, Int64, Rows, Summed, SummedArrays
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.buffer_pool import Sums


class TableStore:
    """The accumulated gradients of one table.

    The table's gradient_accumulation_status selects one of two ways. On: all frames are summed in one accumulator. Off:
    every frame is coalesced and applied separately, in arrival order.

    vocabulary_size : None: any int64 is an id
    dim : floats per row; mean : divide sums by the number of frames at the opening
    accumulate : sum all frames; False: keep them separate
    is_share : other processes own other rows of the table; separate frames are then kept even without a row here, so
        that the buffered frames have the same numbers in every process
    count_frames, count_rows : whether ``look`` says in how many frames every id occurred, and how many rows it has

    accumulator : sums a frame's rows (``pyx.frame_accumulate``), after which ``end`` must follow. It counts the rows
        and distinct ids, buffered ones included, that have entered since its ``start_counting``
    """

    def __init__(
        self,
        vocabulary_size: int | None,
        dim: int,
        *,
        accumulate: bool,
        mean: bool,
        is_share: bool = False,
        count_frames: bool = False,
        count_rows: bool = False,
    ) -> None:
        self.accumulates = accumulate
        self._mean = mean and accumulate
        self._counts_frames = count_frames and accumulate
        self.accumulator = Accumulator(
            dim, vocabulary_size=vocabulary_size, count=self._mean or self._counts_frames, count_rows=count_rows
        )
        self._whole: list[Coalesced] = []  # complete frames, if they are kept separate
        self._of_no_rows = [Coalesced.of_no_rows(dim)] if is_share else []
        self._counts_rows, self._more_rows = count_rows, 0
        self._raw: list[tuple[Int64, Int64]] = []  # ids and the raw rows of each, of a frame that was summed

    @property
    def num_rows(self) -> int:
        """Rows of whole frames since ``start_counting``; of a summed frame the raw rows."""
        return self.accumulator.num_rows + self._more_rows

    def start_counting(self) -> None:
        """Reset the counts of rows and distinct ids."""
        self._more_rows = 0
        self.accumulator.start_counting()

    def count_raw(self, blocks: Sequence[Rows]) -> None:
        """Count the raw rows of a frame that was summed before it was sent, and that has just been added."""
        for block in blocks:
            if block.counts is not None:
                self._more_rows += int(block.counts.sum()) - len(block.ids)
                if self._counts_rows:
                    self._raw.append((block.ids, block.counts))

    def end(self) -> None:
        """End a frame: if frames are kept separate, drain it into the list of complete frames."""
        if not self.accumulates:
            held = [Coalesced(self._with_raw(self.accumulator.drain()))] if len(self.accumulator) else self._of_no_rows
            self._whole += held
            self._raw = []

    def look(self) -> tuple[list[Coalesced], Int64 | None]:
        """Return what ``drain`` will return, not divided, and the frames of every id in it, if they are counted."""
        if not self.accumulates:
            return self._whole, None
        held = [Coalesced(self._with_raw(self.accumulator.sums()))] if len(self.accumulator) else []
        return held, self.accumulator.counts() if self._counts_frames else None

    def drain(self) -> list[Coalesced]:
        """Return and reset the sums: one Coalesced, or one per frame if accumulation is off; none if empty."""
        if self.accumulates:
            self._raw = []
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
                self._whole.append(Coalesced((SummedArrays(held["ids"], held["sums"], held.get("rows")),)))
        self.start_counting()

    def _with_raw(self, parts: tuple[Sums, ...]) -> tuple[Summed, ...]:
        """Return sums with the number of raw rows of each id, in place of that of the rows that were added."""
        if not self._raw:
            return parts
        ids, counts = (np.concatenate(arrays) for arrays in zip(*self._raw, strict=True))
        order = np.argsort(ids)
        found = [order[np.searchsorted(ids, one.ids, sorter=order)] for one in parts]
        return tuple([SummedArrays(one.ids, one.sums, counts[at]) for one, at in zip(parts, found, strict=True)])


def _joined(frame: Coalesced) -> dict[str, Array]:
    ids, sums = (np.concatenate([part[of] for part in frame.parts]) for of in range(2))
    rows = [one.rows for one in frame.summed if one.rows is not None]
    return {"ids": ids, "sums": sums, **({"rows": np.concatenate(rows)} if rows else {})}
