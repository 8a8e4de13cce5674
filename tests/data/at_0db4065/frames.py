"""The configurations and the frames of this folder, and what its writer and its test share."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa

NUM_FRAMES, STOP = 24, 17  # frames of a log, and where a run ends for the first time: one frame is in the gate
GATE = ("--num-required", 3)
DYNAMIC = ("visitor", "session")
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


# ---- configurations and frames


def batch_of(rows):
    """rows : (table, step, contributor, id, gradient, time)"""
    types = (pa.string(), pa.int64(), pa.string(), pa.int64(), pa.list_(pa.float32()), pa.int64())
    names = ("table", "step", "contributor", "id", "gradient", "time")
    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], names)


def frames_of(dims, most):
    """Frames of three workers, one of which is stale once. dims, most : of each table, and how many ids it has"""
    frames = []
    for number in range(NUM_FRAMES):
        step, worker = divmod(number, 3)
        rng, rows = np.random.default_rng(number), []
        for name, dim in dims.items():
            for _ in range(5):
                id_ = int(rng.zipf(1.3)) % most[name] + (3 * step if name in DYNAMIC else 0)
                id_ = id_ * 0x9E3779B97F4A7C15 % 2**62 if name in DYNAMIC else id_
                values = rng.standard_normal(dim).astype(np.float32)
                rows.append((name, max(0, step - 3 * (number == 14)), f"w{worker}", id_, values, 1000 + 60 * step))
        frames.append(batch_of(rows))
    return frames


def damaged(frames):
    """The frames, with a row in two of them whose id is out of range."""
    actual = list(frames)
    for number in (4, 19):
        ids = pa.array([-1, *frames[number]["id"].to_pylist()[1:]], pa.int64())
        actual[number] = frames[number].set_column(frames[number].schema.get_field_index("id"), "id", ids)
    return actual


def static_config(ps):
    return ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(90, 4, name="user", optimizer=ps.Adagrad(0.1)),
            ps.TableConfig(40, 2, name="item", optimizer=ps.Adam(0.05)),
            ps.TableConfig(5, 3, name="group", optimizer=ps.SGD(0.5, use_gradient_accumulation=False)),
        ]
    )


def dynamic_config(ps, visitors=48, visitor_dim=4):
    visitor = ps.Dynamic(min_count=2, expire_after=3, evict="lru")
    session = ps.Dynamic(clock="time", expire_after=200, evict="lfu", half_life=120)
    return ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(40, 2, name="item", optimizer=ps.Adam(0.05)),
            ps.TableConfig(visitors, visitor_dim, name="visitor", optimizer=ps.Adagrad(0.1), dynamic=visitor),
            ps.TableConfig(48, 3, name="session", optimizer=ps.RowWiseAdagrad(0.1), dynamic=session),
        ]
    )


STATIC_DIMS, STATIC_MOST = {"user": 4, "item": 2, "group": 3}, {"user": 90, "item": 40, "group": 5}
DYNAMIC_DIMS, DYNAMIC_MOST = {"item": 2, "visitor": 4, "session": 3}, {"item": 40, "visitor": 60, "session": 60}


# ---- what the writer and the test share


def digest(rows):
    """Return the digest of a store. rows : table → id → the bytes of its row"""
    hashed = hashlib.sha256()
    for table, of_table in sorted(rows.items()):
        for id_, row in sorted(of_table.items()):
            hashed.update(f"{table}\0{id_}\0".encode() + row)
    return hashed.hexdigest()


def read_frames(path):
    with pa.ipc.open_stream(Path(path).read_bytes()) as reader:
        return list(reader)
