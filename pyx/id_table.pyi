import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

@disjoint_base
class IdTable:
    def __new__(cls, num_ids: int = ...) -> IdTable: ...
    def __len__(self) -> int: ...
    def insert(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...

@disjoint_base
class IdMap:
    def __new__(cls, size: int) -> IdMap: ...

@disjoint_base
class IdBits:
    def __new__(cls, size: int) -> IdBits: ...
