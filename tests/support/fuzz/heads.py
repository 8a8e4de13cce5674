"""Hand-made Arrow IPC whose schemas, messages and footers are wrong."""

import struct

from fuzz.flat import (
    END,
    FIXED_LIST,
    RUN_ENDS,
    SCHEMA,
    STRUCT,
    UNION,
    UTF8,
    Table,
    Vector,
    batch,
    column,
    flatbuffer,
    message,
    real,
    schema,
    whole_number,
)
from fuzz.truth import DIM, USER, Inputs, file, rows, shape

# ---- schemas


def schemas() -> Inputs:
    rest = batch(rows("plain")) + END

    def of(columns: list[Table], **more: object) -> tuple[str, bytes]:
        return ".arrows", message(SCHEMA, schema(columns, USER, **more)) + rest

    gradient = column("gradient", FIXED_LIST, {0: ("i", DIM)}, real())
    yield "big-endian", of([whole_number("id"), gradient], endianness=1)
    yield "endianness-9", of([whole_number("id"), gradient], endianness=9)
    for size in (-(1 << 31), -1, 0, 1, DIM + 1, (1 << 31) - 1):
        yield f"width-{size}", of([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", size)}, real())])
    for bits in (-1, 0, 1, 7, 24, 63, 65, 128, (1 << 31) - 1):
        yield f"bits-{bits}", of([whole_number("id", bits), gradient])
    for precision in (-1, 3, 99):
        child = column("item", 3, {0: ("h", precision)})
        yield f"precision-{precision}", of([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", DIM)}, child)])
    yield "no-child", of([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", DIM)})])
    yield "two-children", of([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", DIM)}, real(), real())])
    for kind in range(28):
        yield f"kind-{kind}", of([column("id", kind, {}), gradient])
        yield f"kind-{kind}-of-gradient", of([whole_number("id"), column("gradient", kind, {0: ("i", DIM)}, real())])
        yield f"kind-{kind}-with-children", of([column("id", kind, {}, whole_number("a"), whole_number("b")), gradient])
    for name, fields in {"no-modes": {}, "ids": {0: ("h", 1), 1: Vector([struct.pack("<i", 300)])}}.items():
        yield f"union-{name}", of([column("id", UNION, fields, whole_number("a")), gradient])
    for bits in (0, 8, 16, 64):
        ends = column("table", RUN_ENDS, {}, whole_number("run_ends", bits), column("values", UTF8, {}))
        yield f"run-ends-of-{bits}-bits", of([whole_number("id"), gradient, ends])
    yield "no-name", of([Table({2: ("B", 2), 3: Table({0: ("i", 64), 1: ("?", True)})}), gradient])
    yield "no-kind", of([Table({0: "id"}), gradient])
    yield "no-columns-but-rows", of([])
    yield "one-column-twice", of([whole_number("id")] * 2)
    deep = real()
    for _ in range(3000):
        deep = column("in", STRUCT, {}, deep)
    yield "3000-deep", of([whole_number("id"), deep])
    for levels in (10, 40):  # every struct named twice by the one around it: 2^levels columns in a few kilobytes
        twice = real()
        for _ in range(levels):
            twice = column("in", STRUCT, {}, twice, twice)
        yield f"2^{levels}-columns", of([whole_number("id"), gradient, twice])


# ---- messages


def headers() -> Inputs:
    start, first = message(SCHEMA, shape("plain")), batch(rows("plain"))
    true = rows("plain")
    for version in (-1, 0, 1, 2, 3, 5, 99):
        yield f"version-{version}", (".arrows", start + batch(true, version=version) + END)
        yield (
            f"version-{version}-of-schema",
            (".arrows", message(SCHEMA, shape("plain"), version=version) + first + END),
        )
    for kind in (0, 1, 2, 4, 5, 6, 255):
        yield f"header-{kind}", (".arrows", start + message(kind, true.table(), true.body) + END)
        yield f"header-{kind}-first", (".arrows", message(kind, shape("plain")) + first + END)
    yield "schema-with-a-body", (".arrows", message(SCHEMA, shape("plain"), bytes(64)) + first + END)
    for name, table in {
        "empty": Table({}),
        "no-header": Table({0: ("h", 4), 1: ("B", 3)}),
        "no-kind": Table({0: ("h", 4), 2: true.table(), 3: ("q", len(true.body))}),
    }.items():
        metadata = flatbuffer(table)
        yield (
            f"message-{name}",
            (".arrows", start + struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + metadata + true.body + END),
        )
    for name, metadata in {
        "zeros": bytes(64),
        "ones": b"\xff" * 64,
        "loop": struct.pack("<Ii", 4, 0) + bytes(56),
    }.items():
        yield f"metadata-{name}", (".arrows", start + struct.pack("<Ii", 0xFFFFFFFF, 64) + metadata + END)
    legacy = struct.pack("<i", len(first) - 8 - len(true.body)) + first[8:]
    yield "legacy-inside", (".arrows", start + legacy + bytes(4))
    yield "markers-only", (".arrows", END * 3)
    yield "half-a-marker", (".arrows", start + first + END[:6])
    yield "marker-inside", (".arrows", start + first + END + first + END)
    yield "feather-1", (".arrow", b"FEA1" + bytes(100) + struct.pack("<I", 40) + b"FEA1")
    yield "feather-1-short", (".arrow", b"FEA1FEA1")
    for name, content in {
        "orc": b"ORC" + bytes(99),
        "avro": b"Obj\1" + bytes(99),
        "gzip": b"\x1f\x8b" + bytes(99),
    }.items():
        yield f"other-{name}", (".arrows", content)


# ---- footers


def footers() -> Inputs:
    def of(layout: str, **lies: object) -> bytes:
        return file("plain", bare_schema=True, **lies) if layout == "bare" else file(layout, **lies)

    for layout in ("plain", "dictionary", "zstd", "bare"):
        for name, change in {
            "batch-twice": lambda entries: [*entries, entries[-1]],
            "batch-omitted": lambda entries: entries[:-1],
            "first-omitted": lambda entries: [entry for entry in entries if entry[0] == "dictionary"] + entries[-1:],
            "no-batches": lambda entries: [],
            "batches-swapped": lambda entries: entries[:-2] + entries[:-3:-1],
            "as-dictionaries": lambda entries: [["dictionary", *entry[1:]] for entry in entries],
            "as-batches": lambda entries: [["batch", *entry[1:]] for entry in entries],
            "no-dictionaries": lambda entries: [entry for entry in entries if entry[0] == "batch"],
            "inside": lambda entries: [[kind, offset + 8, metadata, body] for kind, offset, metadata, body in entries],
            "before": lambda entries: [[kind, offset - 8, metadata, body] for kind, offset, metadata, body in entries],
            "short-metadata": lambda entries: [[kind, offset, 8, body] for kind, offset, metadata, body in entries],
            "no-metadata": lambda entries: [[kind, offset, 0, body] for kind, offset, metadata, body in entries],
            "negative-metadata": lambda entries: [[kind, offset, -8, body] for kind, offset, metadata, body in entries],
            "long-metadata": lambda entries: [
                [kind, offset, metadata + body, 0] for kind, offset, metadata, body in entries
            ],
            "no-body": lambda entries: [[kind, offset, metadata, 0] for kind, offset, metadata, body in entries],
            "negative-body": lambda entries: [[kind, offset, metadata, -1] for kind, offset, metadata, body in entries],
            "long-body": lambda entries: [
                [kind, offset, metadata, body + 8] for kind, offset, metadata, body in entries
            ],
            "at-the-schema": lambda entries: [[kind, 8, metadata, body] for kind, offset, metadata, body in entries],
            "at-zero": lambda entries: [[kind, 0, metadata, body] for kind, offset, metadata, body in entries],
            "unaligned": lambda entries: [
                [kind, offset + 1, metadata, body] for kind, offset, metadata, body in entries
            ],
            "10000-times": lambda entries: entries + entries[-1:] * 10_000,
        }.items():
            yield f"{layout}-footer-{name}", (".arrow", of(layout, blocks=change))
        for other in ("lists", "views", "run-ends", "dictionary", "plain"):
            if other != layout:
                yield f"{layout}-footer-schema-{other}", (".arrow", of(layout, footer_schema=shape(other)))
        wide = schema([whole_number("id", 8), column("gradient", FIXED_LIST, {0: ("i", 1 << 30)}, real())], USER)
        yield f"{layout}-footer-schema-wide", (".arrow", of(layout, footer_schema=wide))
