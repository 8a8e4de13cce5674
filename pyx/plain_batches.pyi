from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from penstock.pyx.buffer_pool import Pool
from penstock.pyx.coded_rows import CodedRows
from penstock.pyx.gradient_blocks import GradientBlocks

_Int64 = npt.NDArray[np.int64]

@disjoint_base
class PlainRows:
    @property
    def blocks(self) -> GradientBlocks: ...
    @property
    def bounds(self) -> _Int64: ...
    @property
    def steps(self) -> _Int64 | None: ...
    @property
    def are_own(self) -> bool: ...

def plain_rows(
    batch: Any, pool: Pool, num_columns: int, id_at: int, gradient_at: int, step_at: int, width: int
) -> PlainRows | None: ...
def coded_rows(
    batch: Any,
    pool: Pool,
    num_columns: int,
    table_at: int,
    code_bytes: int,
    id_at: int,
    gradient_at: int,
    width: int,
    offset_bytes: int,
    step_at: int,
) -> tuple[CodedRows, tuple[int, ...]] | None: ...

@disjoint_base
class RepeatedMessages:
    def __init__(
        self,
        first: bytes,
        mask: npt.NDArray[np.uint8],
        numbers: _Int64,
        buffers: _Int64,
        id_at: int,
        gradient_at: int,
        step_at: int,
        width: int,
        codes_at: int = -1,
    ) -> None: ...
    def read(
        self, data: Any, begin: int, spans: _Int64 | None, most_rows: int, ends_frames: bool
    ) -> tuple[PlainRows | CodedRows, list[int]] | None: ...
