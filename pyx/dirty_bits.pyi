from typing import Final

import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]
_UInt8 = npt.NDArray[np.uint8]

CHANGED: Final[int]
WAITING: Final[int]

def change(marks: _UInt8, ids: _Int64, waiting: _Int64) -> int: ...
def take(marks: _UInt8, cursor: int, stride: int, most_looked_at: int, out: _Int64) -> tuple[int, int]: ...
