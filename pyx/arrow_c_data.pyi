from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

_Int64 = npt.NDArray[np.int64]

@disjoint_base
class Memory: ...

def plain_rows(
    batch: Any, num_columns: int, id_at: int, gradient_at: int, step_at: int, width: int
) -> tuple[_Int64, npt.NDArray[np.float32], _Int64 | None] | None: ...
