import numpy as np
import numpy.typing as npt

_Float64 = npt.NDArray[np.float64]

NUM_EXPONENTS: int

def row_squares(rows: npt.NDArray[np.float32], out: _Float64) -> None: ...
def clip_rows(rows: npt.NDArray[np.float32], squares: _Float64, most: float, epsilon: float) -> int: ...
def add_exactly(values: _Float64, limbs: npt.NDArray[np.uint64]) -> None: ...
