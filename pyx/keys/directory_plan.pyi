from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from penstock.pyx.keys.directory import Directory

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
EXPIRED: int
EVICTED: int

@disjoint_base
class Plan:
    def __new__(
        cls,
        directory: Directory,
        keys: _Int64,
        rows: _Int64 | None = None,
        frames: _Int64 | None = None,
        *,
        clock: int,
        step: int,
        admit_all: bool = False,
        run: Callable[[list[Callable[[], bool]]], Any] | None = None,
    ) -> Plan: ...
    @property
    def keys(self) -> _Int64: ...
    @property
    def key_rows(self) -> _Int64: ...
    @property
    def all_have_rows(self) -> bool: ...
    @property
    def fresh(self) -> _Int32: ...
    @property
    def num_admitted(self) -> int: ...
    @property
    def num_expired(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_rejected(self) -> int: ...
    @property
    def fullest(self) -> tuple[int, int]: ...
    def removed(self) -> tuple[_Int64, npt.NDArray[np.uint8]]: ...
    def commit(self) -> None: ...
    def cancel(self) -> None: ...
