"""Inputs that no random damage would make: bombs, claims without bytes, types where others are wanted.

Each is what its name says; all are small files. Made without pyarrow's checks, which would refuse to.
"""

import io
import struct
from collections.abc import Callable, Iterator
from functools import partial

import ipc
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from fuzz.mutate import messages
from fuzz.seeds import DIM, NUM_ROWS, batch_of, parquet, stream
from ipc import log

Inputs = Iterator[tuple[str, tuple[str, bytes]]]

BOMB_ROWS = 1 << 25  # 768 MiB when unpacked
USER = pa.schema([("id", pa.int64()), ("gradient", pa.list_(pa.float32(), DIM))], metadata={"penstock.table": "user"})


def crafted_inputs(only: str | None = None) -> dict[str, tuple[str, bytes]]:
    """name → suffix and bytes; only : the name of the one to create, because compressing bombs takes seconds"""
    inputs = dict([*claims(), *other_types(), *wrong_inside(), *odd_streams(), *parquet_files()])
    wanted = {name: created for name, created in inputs.items() if only in (None, name)}
    return wanted | {name: (suffix, create()) for name, suffix, create in bombs() if only in (None, name)}


def stream_of(columns: dict[str, pa.Array], **options: object) -> bytes:
    """A row stream with some columns instead of the usual ones."""
    usual = batch_of("plain", 0)
    arrays = {name: usual.column(name) for name in usual.schema.names} | columns
    return ipc.stream([pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))], **options)


# ---- more than it seems


def bombs() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """(name, suffix, function that returns the bytes) of each"""
    # Zeros on pages that were never touched: they cost this process no memory.
    ids = pa.Array.from_buffers(pa.int64(), BOMB_ROWS, [None, pa.py_buffer(np.zeros(BOMB_ROWS, np.int64))])
    zeros = pa.py_buffer(np.zeros(BOMB_ROWS * DIM, np.float32))
    flat = pa.Array.from_buffers(pa.float32(), BOMB_ROWS * DIM, [None, zeros])
    gradient = pa.FixedSizeListArray.from_arrays(flat, DIM)
    batch = pa.RecordBatch.from_arrays([ids, gradient], schema=USER)
    for codec in ("zstd", "lz4"):
        for suffix, make in ((".arrows", pa.ipc.new_stream), (".arrow", pa.ipc.new_file)):
            yield f"bomb-{codec}{suffix}", suffix, partial(ipc.stream, [batch], make=make, compression=codec)
    for name, rows in (("one-row-of-2^27", 1), ("2^17-rows-of-2^10", 1 << 17)):
        for dictionary in (True, False):
            yield f"{name}-{'dictionary' if dictionary else 'plain'}", ".parquet", partial(long_rows, rows, dictionary)


def long_rows(rows: int, dictionary: bool) -> bytes:
    """A Parquet file of this many rows, which have 2^27 zeros together."""
    values = pa.Array.from_buffers(pa.float32(), 1 << 27, [None, pa.py_buffer(np.zeros(1 << 27, np.float32))])
    gradient = pa.ListArray.from_arrays(pa.array(np.linspace(0, 1 << 27, rows + 1, dtype=np.int32)), values)
    table = pa.table({"id": pa.array([1] * rows), "step": pa.array([0] * rows), "gradient": gradient})
    sink = io.BytesIO()
    table = table.replace_schema_metadata({"penstock.table": "user"})
    pa.parquet.write_table(table, sink, compression="zstd", use_dictionary=dictionary)
    return sink.getvalue()


def claims() -> Inputs:
    """Numbers that no bytes stand behind."""
    whole = stream([batch_of("plain", 0)])
    start, body, _ = messages(whole)[-1]
    rows = struct.pack("<q", NUM_ROWS)
    for power in (31, 40, 62):
        head = whole[start:body].replace(rows, struct.pack("<q", 1 << power))
        yield f"rows-2^{power}", (".arrows", whole[:start] + head + whole[body:])
    for power in (31, 40, 62):
        empty = pa.RecordBatch.from_arrays([pa.nulls(NUM_ROWS), pa.nulls(NUM_ROWS)], ["id", "gradient"])
        nulls = stream([empty]).replace(rows, struct.pack("<q", 1 << power))
        yield f"nulls-2^{power}", (".arrows", nulls)
    for codec, magic in (("zstd", b"\x28\xb5\x2f\xfd"), ("lz4", b"\x04\x22\x4d\x18")):
        packed = stream([batch_of("plain", 0)], compression=codec)
        offset = packed.find(magic) - 8
        for power in (28, 33, 40, 62):
            claimed = packed[:offset] + struct.pack("<q", 1 << power) + packed[offset + 8 :]
            yield f"unpacks-to-2^{power}-{codec}", (".arrows", claimed)
    for name, length in (("2^31", (1 << 31) - 8), ("negative", -8)):
        prefix = struct.pack("<Ii", 0xFFFFFFFF, length)
        yield f"metadata-{name}", (".arrows", whole[:start] + prefix + whole[start + 8 :])


# ---- other types than are wanted


def other_types() -> Inputs:
    n = NUM_ROWS
    ints = pa.array(range(n), pa.int32())
    ids = {
        "list": pa.array([[1]] * n),
        "struct": pa.array([{"a": 1}] * n),
        "bool": pa.array([True] * n),
        "decimal": pa.array([1] * n).cast(pa.decimal128(20, 0)),
        "timestamp": pa.array([1] * n, pa.timestamp("us")),
        "dictionary": ints.dictionary_encode(),
        "run-ends": pa.RunEndEncodedArray.from_arrays(pa.array([n], pa.int32()), pa.array([1])),
        "union": pa.UnionArray.from_dense(pa.array([0] * n, pa.int8()), pa.array(range(n), pa.int32()), [ints]),
        "map": pa.array([[("k", 1)]] * n, pa.map_(pa.utf8(), pa.int32())),
        "null": pa.nulls(n),
        "float": pa.array([1.0] * n),
        "text": pa.array(["1"] * n),
        "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1] * n, pa.int8())),
    }
    for name, column in ids.items():
        yield f"id-{name}", (".arrows", stream_of({"id": column}))
        yield f"step-{name}", (".arrows", stream_of({"step": column}))
        yield f"gradient-{name}", (".arrows", stream_of({"gradient": column}))
        yield f"table-{name}", (".arrows", stream_of({"table": column}))
        yield f"contributor-{name}", (".arrows", stream_of({"contributor": column}))
    flat = pa.array([0.0] * n * DIM, pa.float32())
    gradients = {
        "list-of-lists": pa.array([[[1.0]]] * n),
        "width-0": pa.array([[]] * n, pa.list_(pa.float32(), 0)),
        "list-view": pa.array([[1.0]] * n, pa.list_view(pa.float32())),
        "of-dictionary": pa.array([["a"]] * n, pa.list_(pa.dictionary(pa.int8(), pa.utf8()))),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), [2, 2]), pa.FixedSizeListArray.from_arrays(flat, DIM)
        ),
        "deep": deep(60),
        "very-deep": deep(300),
    }
    for name, column in gradients.items():
        try:
            yield f"gradient-{name}", (".arrows", stream_of({"gradient": column}))
        except pa.ArrowException:  # deeper than pyarrow writes
            continue
    usual = batch_of("plain", 0)
    wide = pa.RecordBatch.from_arrays([usual.column("id")] * 5000, [f"c{offset}" for offset in range(5000)])
    yield "5000-columns", (".arrows", stream([wide]))
    yield "all-one-name", (".arrows", stream([wide.rename_columns(["id"] * 5000)]))
    yield "no-columns", (".arrows", stream([pa.RecordBatch.from_arrays([], schema=pa.schema([]))]))


def deep(levels: int) -> pa.Array:
    column = pa.array([1.0] * NUM_ROWS, pa.float32())
    for _ in range(levels):
        column = pa.StructArray.from_arrays([column], ["in"])
    return column


# ---- the right types, wrong inside


def wrong_inside() -> Inputs:
    n, values = NUM_ROWS, pa.array([0.5] * NUM_ROWS * DIM, pa.float32())
    right = np.arange(0, n * DIM + 1, DIM, dtype=np.int32)
    wrongs = {"back": (5, 0), "beyond": (n, 1 << 30), "negative": (3, -8), "first": (0, -4), "max": (9, 2**31 - 1)}
    for name, (offset, value) in wrongs.items():
        wrong = right.copy()
        wrong[offset] = value
        raw = stream_of({"gradient": pa.ListArray.from_arrays(pa.array(right), values)})
        yield f"offsets-{name}", (".arrows", raw.replace(right.tobytes(), wrong.tobytes()))
    for kind in (pa.int8(), pa.int32(), pa.uint64()):
        for wrong_index in (-1, 2, 127):
            indices = np.tile([0, 1], n // 2).astype(kind.to_pandas_dtype())
            broken = indices.copy()
            broken[4] = np.array(wrong_index).astype(broken.dtype)
            column = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(["user", "item"]))
            raw = stream_of({"table": column}).replace(indices.tobytes(), broken.tobytes())
            yield f"index-{wrong_index}-{kind}", (".arrows", raw)
    dictionary = pa.dictionary(pa.int8(), pa.utf8())
    kinds = {"utf8": pa.utf8(), "large": pa.large_utf8(), "view": pa.string_view(), "dictionary": dictionary}
    for name, text in (("ff", b"\xff\xff\xff\xff"), ("surrogate", b"\xed\xa0\x80u"), ("zero", b"\0\0\0\0")):
        for kind_name, kind in kinds.items():
            column = pa.array(["user"] * n).cast(kind)
            raw = stream_of({"table": column}).replace(b"user", text)
            yield f"text-{name}-{kind_name}", (".arrows", raw)
    views = stream_of({"table": pa.array(["a table with a long name"] * n, pa.string_view())})
    offset = views.find(struct.pack("<i4s", 24, b"a ta"))
    for name, wrong_view in (
        ("buffer", (24, b"a ta", 9, 0)),
        ("offset", (24, b"a ta", 0, 1 << 30)),
        ("length", (-1, b"a ta", 0, 0)),
    ):
        yield f"view-{name}", (".arrows", views[:offset] + struct.pack("<i4sii", *wrong_view) + views[offset + 16 :])
    for name in (b"gradient", b"table", b"id"):
        raw = stream([batch_of("plain", 0)])
        yield f"name-{name.decode()}-not-utf8", (".arrows", raw.replace(name, b"\xff" * len(name)))


# ---- streams of odd messages


def odd_streams() -> Inputs:
    batches = [batch_of("dictionary", number) for number in range(3)]
    whole = stream(batches)
    lie = messages(whole)
    part = whole[: lie[0][2]]
    yield "no-dictionary", (".arrows", part + whole[lie[-1][0] :])
    yield "schema-again", (".arrows", part + part[lie[0][0] :] + whole[lie[0][2] :])
    yield "schema-only", (".arrows", part + struct.pack("<Ii", 0xFFFFFFFF, 0))
    yield "no-schema", (".arrows", whole[lie[0][2] :])
    yield "reversed", (".arrows", part + b"".join(whole[a:c] for a, _, c in reversed(lie[1:])))
    yield "10000-empty-batches", (".arrows", stream([batches[0].slice(0, 0)] * 10_000))
    for version in (pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5):
        yield f"version-{version}", (".arrows", stream_of({}, metadata_version=version))
    yield "legacy", (".arrows", stream_of({}, metadata_version=pa.ipc.MetadataVersion.V4, use_legacy_format=True))
    yield "deltas", (".arrows", stream_of({}, emit_dictionary_deltas=True))
    tensor = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.zeros((4, 4))), tensor)
    yield "tensor", (".arrows", tensor.getvalue().to_pybytes())
    yield "tensor-inside", (".arrows", part + tensor.getvalue().to_pybytes())
    for metadata in (
        {b"\xff": b"\xff"},
        {b"penstock.table": b"\xff\xff"},
        {b"penstock.log": b"\xff"},
        {b"k": b"v" * (1 << 24)},
    ):
        marked = pa.Table.from_batches(batches[:1]).replace_schema_metadata(metadata).to_batches()
        yield f"metadata-{next(iter(metadata)).decode('latin-1')}-{len(metadata)}", (".arrows", stream(marked))
    logged = log(batches)
    yield "log-as-file", (".arrow", b"ARROW1\0\0" + logged)
    yield "two-logs", (".arrows", logged + logged)
    for name, content in (
        ("nothing", b""),
        ("magic", b"ARROW1"),
        ("magic-twice", b"ARROW1\0\0ARROW1"),
        ("zeros", bytes(4096)),
    ):
        yield name, (".arrow", content)


# ---- Parquet


def parquet_files() -> Inputs:
    whole = parquet([batch_of("plain", 0)], "none", "1.0")
    length = int.from_bytes(whole[-8:-4], "little")
    footer = whole[-8 - length : -8]
    for name, new in (
        ("lists-of-lists", b"\x19" * 100_000),
        ("structs", b"\x1c" * 100_000),
        ("list-2^31", b"\x15\x02\x19\xfc\xff\xff\xff\xff\x07"),
        ("text-2^31", b"\x18\xff\xff\xff\xff\x07"),
        ("map-2^31", b"\x1b\xff\xff\xff\xff\x07\x55"),
        ("empty", b"\0"),
        ("none", b""),
    ):
        yield f"footer-{name}", (".parquet", b"PAR1" + new + struct.pack("<I", len(new)) + b"PAR1")
    for name, size in (("0", 0), ("2^31", 1 << 31), ("all", len(whole)), ("2^32", (1 << 32) - 1)):
        yield f"footer-of-{name}-bytes", (".parquet", whole[:-8] + struct.pack("<I", size) + b"PAR1")
    yield "footer-twice", (".parquet", whole + footer + whole[-8:])
    yield "encrypted", (".parquet", whole[:-4] + b"PARE")
    # The first page: type, uncompressed and compressed size.
    offset = 4
    for name, claim in (
        ("2^31", b"\xfe\xff\xff\xff\x0f"),
        ("negative", b"\xff\xff\xff\xff\x0f"),
        ("2^28", b"\x80\x80\x80\x80\x02"),
    ):
        for codec in ("none", "snappy", "zstd"):
            good = parquet([batch_of("plain", 0)], codec, "1.0")
            end = offset + 3 + next(n for n in range(9) if good[offset + 3 + n] < 128) + 1
            yield f"page-{name}-{codec}", (".parquet", good[: offset + 3] + claim + good[end:])
