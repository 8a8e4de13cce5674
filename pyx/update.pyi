from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from penstock.pyx.buffer_pool import Sums

_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]

NUMBERS: list[str]

def rules() -> dict[str, int]: ...

@disjoint_base
class TableRule:
    @property
    def end(self) -> int: ...
    @property
    def first_float(self) -> int: ...
    @property
    def row_floats(self) -> int: ...
    @property
    def first_page(self) -> int: ...
    def __init__(
        self,
        rule: str,
        numbers: Mapping[str, float],
        *,
        dim: int,
        vocabulary_size: int,
        rows_per_shard: int,
        num_shards: int = 1,
        shards_per_device: int = 1,
        mod: bool = False,
        non_lazy: bool = False,
        target: str = "",
        first_float: int = 0,
        name: str = "",
    ) -> None: ...

@disjoint_base
class Step:
    def __new__(cls, rules: Sequence[TableRule], floats: Sequence[_Float32]) -> Step: ...
    @property
    def counters_per_thread(self) -> int: ...
    def count_pages(self, counters: Sequence[npt.NDArray[np.uint64]]) -> None: ...
    def note_steps(self, words: npt.NDArray[np.uint64]) -> None: ...
    def take_not_finite(self) -> tuple[int, tuple[int, int, int]] | None: ...
    def run(self, run_tasks: Callable[[Iterable[Callable[[], bool]]], object], threads: int) -> None: ...
    def help(self) -> bool: ...
    def help_with_next(self) -> bool: ...
    def update(self, updates: Sequence[tuple[int, Sequence[tuple[_Int64, _Float32] | Sums], float]]) -> None: ...
    def copy(self, number: int, ids: _Int64 | int, values: _Float32, part: int | None, write: bool) -> None: ...
