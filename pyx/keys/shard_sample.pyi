import numpy as np
import numpy.typing as npt

from penstock.pyx.keys.directory import Directory

_Int64 = npt.NDArray[np.int64]

def sampled(directory: Directory, keys: _Int64, sample_bits: int) -> _Int64: ...
def by_shard(directory: Directory) -> dict[str, _Int64]: ...
