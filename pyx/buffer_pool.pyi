from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

_Int64 = npt.NDArray[np.int64]

@disjoint_base
class Pool: ...

@disjoint_base
class Sums:
    @property
    def num_ids(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def ids(self) -> _Int64: ...
    @property
    def rows(self) -> _Int64 | None: ...
    @property
    def sums(self) -> npt.NDArray[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __iter__(self) -> Iterator[npt.NDArray[Any]]: ...
