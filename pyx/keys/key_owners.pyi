import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]

def owners(keys: _Int64, seed: int, table: str, capacity: int, count: int) -> _Int64: ...
def owned_rows(capacity: int, rank: int, count: int) -> tuple[int, int]: ...
