import numpy as np
import numpy.typing as npt

_Int64 = npt.NDArray[np.int64]
_Int32 = npt.NDArray[np.int32]
_UInt8 = npt.NDArray[np.uint8]
_Float32 = npt.NDArray[np.float32]

BEGINS: int

def locate(ids: _Int64, vocabulary_size: int, num_shards: int, mod: bool) -> tuple[_Int64, _Int64]: ...
def scatter(
    owners: _Int64,
    numbers: _Int64,
    grads: _Float32,
    which: _Int64 | None,
    gains: _Float32 | None,
    counts: _Int64 | None,
    rows_at: _Int64,
    floats_at: _Int64,
    out_numbers: _Int64,
    out_grads: _Float32,
    out_counts: npt.NDArray[np.uint32] | None,
) -> None: ...
def destinations(
    ids: _Int64,
    vocabulary_size: int,
    num_shards: int,
    mod: bool,
    shards_per_owner: int,
    rows_per_shard: int,
    group: int,
    first_line: int,
    devices: _Int32,
    lines: _Int32,
    places: _Int32 | None,
    counts: _Int64,
) -> None: ...
def order(
    devices: _Int32, first: int, next_of: _Int64, cells: _Int32, starts: _Int64 | None, entries: _Int32 | None
) -> None: ...
def number(rows: _Int32, lines: _Int32, numbers: _Int32) -> _Int32: ...
def group(rows: _Int32, num_lines: int, places: _Int32, cells: _Int32, marks: _UInt8) -> None: ...
def lay(
    devices: _Int32,
    cells: _Int32,
    first_cell: int,
    values: _Float32,
    words: _Int32,
    places: _Int32 | None = None,
    offsets: _Int32 | None = None,
    lines: _Int32 | None = None,
    out_lines: _Int32 | None = None,
    streams: bool = False,
) -> None: ...
