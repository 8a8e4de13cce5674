from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from penstock.pyx.row_keys import RowKeys
from penstock.rows.shared.header import TableLayout

_Float32 = npt.NDArray[np.float32]

@disjoint_base
class StepWords:
    durable_step: int
    frame_time: int | None
    @property
    def memory(self) -> npt.NDArray[np.uint64]: ...
    state: int
    def __init__(self, memory: npt.NDArray[np.uint64]) -> None: ...
    def begin(self) -> None: ...
    def end(self, step: int) -> None: ...
    @property
    def sequence(self) -> int: ...
    def settled(self) -> int: ...
    def is_still(self, sequence: int) -> bool: ...
    @property
    def step(self) -> int: ...

@disjoint_base
class RowReads:
    def __init__(
        self,
        layout: TableLayout,
        parts: Iterable[tuple[_Float32, npt.NDArray[np.uint64]]],
        keys: RowKeys | None,
    ) -> None: ...
    def read(self, ids: npt.NDArray[np.int64], out: _Float32, absent: npt.NDArray[np.uint8], first: int = 0) -> int: ...
