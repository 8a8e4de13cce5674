from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

_Int64 = npt.NDArray[np.int64]
_Arrays = dict[str, npt.NDArray[Any]]
POLICIES: dict[str | None, int]

@disjoint_base
class Directory:
    num_admitted: int
    num_expired: int
    num_evicted: int
    num_returned: int
    num_rejected: int
    unadmitted_rows: int
    def __new__(
        cls,
        capacity: int,
        seed: int,
        table: str,
        *,
        min_count: int = 1,
        by_frames: bool = False,
        probability: float | None = None,
        forget_after: int | None = None,
        expire_after: int | None = None,
        evict: str | None = None,
        half_life: int | None = None,
    ) -> Directory: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_shards(self) -> int: ...
    @property
    def clock(self) -> int: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def candidate_bytes(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_expired_now(self) -> int: ...
    def rows(self, keys: _Int64, expired: bool = False) -> npt.NDArray[np.int32]: ...
    def records(self, keys: _Int64) -> _Arrays: ...
    def state(self, expired: bool = True) -> _Arrays: ...
    def candidates(self) -> _Arrays: ...
    def get_state(self) -> _Arrays: ...
    def set_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int32]: ...
    def _sweep_every(self, period: int) -> None: ...

def philox_key(purpose: bytes, seed: int, table: str) -> bytes: ...
