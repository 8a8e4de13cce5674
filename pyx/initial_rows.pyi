import numpy as np
import numpy.typing as npt

def draw(
    keys: npt.NDArray[np.int64],
    key_bytes: bytes,
    normal: bool,
    first: float,
    second: float,
    out: npt.NDArray[np.float32],
) -> None: ...
def philox_key(purpose: bytes, seed: int, table: str) -> bytes: ...
