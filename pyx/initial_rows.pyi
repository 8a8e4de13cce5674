import numpy as np
import numpy.typing as npt

def draw(
    keys: npt.NDArray[np.int64],
    philox_key: bytes,
    normal: bool,
    first: float,
    second: float,
    out: npt.NDArray[np.float32],
) -> None: ...
