from typing import Any

import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]

def add_finite(
    sums: npt.NDArray[Any], slots: _Int64, rows: npt.NDArray[Any], refused: npt.NDArray[np.uint8]
) -> None: ...
def combine(rows: _Float32, indices: _Int64 | None, samples: _Int64, gains: _Float32 | None, out: _Float32) -> None: ...
