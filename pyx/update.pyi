from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]

NUMBERS: list[str]

def handlers() -> dict[str, object]: ...
def targets() -> list[str]: ...
def rules() -> dict[str, int]: ...

@disjoint_base
class Plan:
    @property
    def zeros(self) -> _Float32: ...
    def __init__(
        self,
        rule: str,
        numbers: Mapping[str, float],
        starts: Sequence[float],
        dim: int,
        vocabulary_size: int,
        num_shards: int,
        mod: bool,
        rows_per_shard: int,
        shards_per_device: int,
        non_lazy: bool,
        threads: int,
        target: str = "",
    ) -> None: ...

@disjoint_base
class Step:
    def __new__(cls, plan: Plan) -> Step: ...
    @property
    def address(self) -> int: ...
    def update(self, segments: Sequence[tuple[_Int64, _Float32]], lr: float) -> None: ...
    def copy(self, ids: _Int64 | int, values: _Float32, part: int, write: bool) -> None: ...
    def copy_all(self, ids: _Int64 | int, values: _Float32) -> None: ...
    def release(self) -> None: ...
