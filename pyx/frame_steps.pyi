from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from penstock.pyx.accumulator import Accumulator
from penstock.pyx.gate_counts import GateCounts
from penstock.pyx.gradient_blocks import GradientBlocks
from penstock.pyx.update import Step

SMALL_ROWS: int

_Int64 = npt.NDArray[np.int64]

@disjoint_base
class FrameSteps:
    def __init__(
        self,
        gate: GateCounts,
        accumulator: Accumulator,
        step: Step,
        lock: AbstractContextManager[Any],
        table: int,
        mean: bool,
    ) -> None: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def more_bytes(self) -> int: ...
    @property
    def ids(self) -> _Int64: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def seconds(self) -> list[float]: ...
    def take(
        self,
        blocks: GradientBlocks,
        bounds: _Int64,
        steps: _Int64 | None,
        first: int,
        most_frames: int,
        most_steps: int,
        most_changes: int,
        rate: float,
        number: int,
    ) -> int: ...
