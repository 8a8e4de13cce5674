"""What hand-made Arrow IPC says where it does not lie: a small batch in every layout, as stream and file."""

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from fuzz.flat import (
    END,
    FIXED_LIST,
    LIST,
    LIST_VIEW,
    LZ4,
    RUN_ENDS,
    SCHEMA,
    TEXT_VIEW,
    UTF8,
    ZSTD,
    Rows,
    Table,
    batch,
    codes,
    column,
    dictionary,
    ipc_file,
    message,
    real,
    schema,
    whole_number,
)

N, DIM = 24, 4
IDS = np.arange(N) % 20
VALUES = np.linspace(-1, 1, N * DIM, dtype=np.float32)
LIST_OFFSETS = np.arange(0, N * DIM + 1, DIM, dtype=np.int32)
USER = {"penstock.table": "user"}
WRONG = (-(1 << 63), -(1 << 31), -8, -1, 0, 1, 3, 1 << 31, 1 << 40, (1 << 62), (1 << 63) - 1)
LAYOUTS = ("plain", "lists", "dictionary", "views", "list-views", "lz4", "zstd", "run-ends")

Inputs = Iterator[tuple[str, tuple[str, bytes]]]


def shape(layout: str) -> Table:
    gradient = {
        "lists": column("gradient", LIST, {}, real()),
        "list-views": column("gradient", LIST_VIEW, {}, real()),
    }.get(layout, column("gradient", FIXED_LIST, {0: ("i", DIM)}, real()))
    table = {
        "dictionary": [column("table", UTF8, {}, dictionary=codes(7))],
        "views": [column("contributor", TEXT_VIEW, {})],
        "run-ends": [column("table", RUN_ENDS, {}, whole_number("run_ends", 32), column("values", UTF8, {}))],
    }.get(layout, [])
    return schema([whole_number("id"), gradient, *table], {} if layout == "dictionary" else USER)


def rows(layout: str) -> Rows:
    made = Rows(N)
    if layout in ("lz4", "zstd"):
        made.codec = LZ4 if layout == "lz4" else ZSTD
        made.add(N, b"", packed(IDS.tobytes(), layout)).add(N, b"").add(N * DIM, b"", packed(VALUES.tobytes(), layout))
        return made
    made.add(N, b"", IDS.tobytes())
    if layout == "lists":
        made.add(N, b"", LIST_OFFSETS.tobytes())
    elif layout == "list-views":
        made.add(N, b"", LIST_OFFSETS[:-1].tobytes(), np.full(N, DIM, np.int32).tobytes())
    else:
        made.add(N, b"")
    made.add(N * DIM, b"", VALUES.tobytes())
    if layout == "dictionary":
        made.add(N, b"", bytes(N // 2) + b"\1" * (N // 2))
    elif layout == "views":
        long = b"a worker with a long name"
        made.add(N, b"", struct.pack("<i4sii", len(long), long[:4], 0, 0) * N, long)
        made.views = [1]
    elif layout == "run-ends":
        made.add(N).add(1, b"", np.array([N], np.int32).tobytes())
        made.add(1, b"", np.array([0, 4], np.int32).tobytes(), b"user")
    return made


def packed(content: bytes, codec: str) -> bytes:
    return struct.pack("<q", len(content)) + pa.compress(content, codec if codec != "lz4" else "lz4", asbytes=True)


def names(*texts: str) -> Rows:
    """The values of a dictionary."""
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return Rows(len(texts)).add(len(texts), b"", offsets.tobytes(), "".join(texts).encode())


def before(layout: str) -> list[tuple[str, bytes]]:
    return [("dictionary", dictionary(7, names("user", "item")))] if layout == "dictionary" else []


def stream(layout: str, *batches: bytes) -> bytes:
    first = b"".join(item for _, item in before(layout))
    return message(SCHEMA, shape(layout)) + first + (b"".join(batches) or batch(rows(layout))) + END


def file(layout: str, **lies: object) -> bytes:
    return ipc_file(
        shape(layout), [*before(layout), ("batch", batch(rows(layout))), ("batch", batch(rows(layout)))], **lies
    )
