import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

def locate(ids: Int64, vocabulary_size: int, num_shards: int, mod: bool) -> tuple[Int64, Int64]: ...
def place(
    ids: Int64,
    vocabulary_size: int,
    num_shards: int,
    mod: bool,
    shards_per_owner: int,
    rows_per_shard: int,
    num_owners: int,
) -> tuple[Int32, Int32, Int64]: ...
def pad(
    owners: Int32, rows: Int32, grads: Float32, num_owners: int, capacity: int, rows_per_owner: int
) -> tuple[Int32, Float32]: ...
