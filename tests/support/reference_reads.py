"""The rows of a folder of shared tables, read by NumPy and JSON from its files: the twin of Reader."""

import json
import struct
from pathlib import Path

import numpy as np
from reference import place

SLOT_WORDS, HEAD_WORDS, FIRST_ROW = 2, 8, 2


def description(folder):
    """What the header of shared tables describes."""
    data = (Path(folder) / "tables").read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    return json.loads(data[4096 : 4096 + length])


def read(folder, name, ids):
    """The weights of ids, float32 (n, dim); of a dynamic table those of keys with a row, and NaN of the others."""
    table = next(table for table in description(folder)["tables"] if table["name"] == name)
    ids = rows_of_keys(folder, table, ids) if table["keys"] else np.asarray(ids, np.int64)
    out = np.full((len(ids), table["dim"]), np.nan, np.float32)
    layout = (table["num_rows"], table["num_shards"], table["mod"], table["shards_per_part"], table["rows_per_shard"])
    parts, rows = place(np.maximum(ids, 0), *layout, len(table["rows"]))
    if not table["mod"] and table["shards_per_part"] >= table["num_shards"]:  # all in one part: in order of id
        rows = ids
    for number, (part, row) in enumerate(zip(parts, rows, strict=True)):
        if ids[number] >= 0:
            floats = np.fromfile(Path(folder) / table["rows"][part], np.float32)
            first = table["first_float"] + row * table["row_floats"]
            out[number] = floats[first : first + table["dim"]]
    return out


def rows_of_keys(folder, table, keys):
    """The row of each key, -1 without one."""
    file, *_ = table["keys"]
    words = np.fromfile(Path(folder) / file, np.uint64)
    slots = words[HEAD_WORDS : HEAD_WORDS + SLOT_WORDS * (3 * table["num_rows"] + 1)].reshape(-1, SLOT_WORDS)
    rows = {int(key): int(state) - FIRST_ROW for key, state in slots if state >= FIRST_ROW}
    return np.array([rows.get(int(key), -1) for key in np.asarray(keys, np.int64).view(np.uint64)], np.int64)
