from typing import Any

import numpy as np
import numpy.typing as npt

def split_rows(
    ids: npt.NDArray[np.int64], num_parts: int, wide: bool, isa: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]: ...
