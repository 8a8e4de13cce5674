"""Arrow IPC whose every number is a lie in turn: counts, lengths, offsets, kinds; and what only a hand would make.

Streams and files are written field by field (flat.py), so that each is well-formed but for what its name says.
"""

import copy
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
    STRUCT,
    TEXT_VIEW,
    UNION,
    UTF8,
    ZSTD,
    Rows,
    Table,
    Vector,
    batch,
    codes,
    column,
    dictionary,
    flatbuffer,
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


def handmade_inputs() -> dict[str, tuple[str, bytes]]:
    """name → suffix and bytes"""
    return dict([*good(), *numbers(), *contents(), *dictionaries(), *schemas(), *headers(), *footers()])


def good() -> Inputs:
    """Those that nothing is wrong with, and two of a kind that is refused by name."""
    for layout in LAYOUTS:
        yield f"good-{layout}", (".arrows", stream(layout))
        yield f"good-{layout}-file", (".arrow", file(layout))


# ---- what is true


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
    first = b"".join(one for _, one in before(layout))
    return message(SCHEMA, shape(layout)) + first + (b"".join(batches) or batch(rows(layout))) + END


def file(layout: str, **lies: object) -> bytes:
    return ipc_file(
        shape(layout), [*before(layout), ("batch", batch(rows(layout))), ("batch", batch(rows(layout)))], **lies
    )


# ---- every number, in turn


def numbers() -> Inputs:
    for layout in LAYOUTS:
        true = rows(layout)
        for name, change in lies(true):
            made = copy.deepcopy(true)
            change(made)
            yield f"{layout}-{name}", (".arrows", stream(layout, batch(made)))
            if name.endswith(("-2", "-5", "-8")):
                told = [*before(layout), ("batch", batch(made))]
                yield f"{layout}-{name}-file", (".arrow", ipc_file(shape(layout), told))
        for number, length in enumerate((*WRONG, len(true.body) - 8, len(true.body) + 8)):
            yield f"{layout}-body-{number}", (".arrows", stream(layout, batch(true, body_length=length)))


def lies(true: Rows):
    """name, and what makes rows lie"""
    body = len(true.body)
    for number, value in enumerate((*WRONG, N - 1, N + 1)):
        yield f"length-{number}", lambda made, value=value: setattr(made, "length", value)
        yield f"nodes-{number}", lambda made, value=value: setattr(made, "num_nodes", value & 0xFFFFFFFF)
        yield f"buffers-{number}", lambda made, value=value: setattr(made, "num_buffers", value & 0xFFFFFFFF)
        for at, (length, nulls) in enumerate(true.nodes):
            yield f"node-{at}-length-{number}", lambda made, at=at, pair=(value, nulls): put(made.nodes, at, pair)
            yield f"node-{at}-nulls-{number}", lambda made, at=at, pair=(length, value): put(made.nodes, at, pair)
            yield f"node-{at}-both-{number}", lambda made, at=at, pair=(value, value): put(made.nodes, at, pair)
    for number, value in enumerate((*WRONG, body, body - 8, body + 8)):
        for at, (offset, length) in enumerate(true.buffers):
            yield f"buffer-{at}-offset-{number}", lambda made, at=at, pair=(value, length): put(made.buffers, at, pair)
            yield f"buffer-{at}-length-{number}", lambda made, at=at, pair=(offset, value): put(made.buffers, at, pair)
            yield f"buffer-{at}-both-{number}", lambda made, at=at, pair=(value, value): put(made.buffers, at, pair)
    yield "node-missing", lambda made: made.nodes.pop()
    yield "buffer-missing", lambda made: made.buffers.pop()
    yield "node-more", lambda made: made.nodes.append((N, 0))
    yield "buffer-more", lambda made: made.buffers.append((0, 8))
    for number, value in enumerate((-1, 0, 2, 1 << 31, 1 << 62)):
        yield f"views-{number}", lambda made, value=value: setattr(made, "views", [value])
    yield "views-many", lambda made: setattr(made, "views", [1] * 1000)
    for codec in (-1, 0, 1, 2, 127):
        yield f"codec-{codec}", lambda made, codec=codec: setattr(made, "codec", codec)
    yield "codec-method", lambda made: (setattr(made, "codec", 1), setattr(made, "method", 9))


def put(where: list, at: int, pair: tuple[int, int]) -> None:
    where[at] = pair


# ---- right numbers, wrong contents


def contents() -> Inputs:
    for name, change in {
        "decreasing": lambda o: np.concatenate([o[::-1]]),
        "down-in-the-middle": lambda o: np.where(np.arange(N + 1) == 9, 0, o),
        "negative": lambda o: o - 8,
        "beyond": lambda o: o + 8,
        "huge-last": lambda o: np.where(np.arange(N + 1) == N, 2**31 - 1, o),
        "lowest": lambda o: np.where(np.arange(N + 1) == 3, -(2**31), o),
        "zero": lambda o: o * 0,
    }.items():
        made = rows("lists")
        made.body = made.body.replace(LIST_OFFSETS.tobytes(), change(LIST_OFFSETS).astype(np.int32).tobytes())
        yield f"lists-{name}", (".arrows", stream("lists", batch(made)))
    for number, (at, size) in enumerate(
        ((-1, 4), (0, -1), (N * DIM, 1), (2**31 - 1, 2**31 - 1), (0, 2**31 - 1), (0, 0))
    ):
        made = Rows(N).add(N, b"", IDS.tobytes())
        made.add(N, b"", np.full(N, at, np.int32).tobytes(), np.full(N, size, np.int32).tobytes())
        made.add(N * DIM, b"", VALUES.tobytes())
        yield f"list-views-{number}", (".arrows", stream("list-views", batch(made)))
    for number, view in enumerate(
        (
            struct.pack("<i4sii", 24, b"a ta", 1, 0),
            struct.pack("<i4sii", 24, b"a ta", -1, 0),
            struct.pack("<i4sii", 24, b"a ta", 0, -1),
            struct.pack("<i4sii", 24, b"a ta", 0, 1),
            struct.pack("<i4sii", 2**31 - 1, b"a ta", 0, 0),
            struct.pack("<i4sii", -(2**31), b"a ta", 0, 0),
            struct.pack("<i4sii", 24, b"xxxx", 0, 0),
            struct.pack("<i12s", 4, b"user" + b"\xff" * 8),
            struct.pack("<i12s", 12, b"\xff" * 12),
        )
    ):
        made = rows("views")
        start = made.buffers[5][0]
        made.body = made.body[:start] + view + made.body[start + 16 :]
        yield f"views-view-{number}", (".arrows", stream("views", batch(made)))
    for name, ends in {
        "zero": [0],
        "negative": [-1],
        "short": [N - 1],
        "long": [N + 1],
        "huge": [2**31 - 1],
        "falling": [N, 3],
        "equal": [N, N],
    }.items():
        made = Rows(N).add(N, b"", IDS.tobytes()).add(N, b"").add(N * DIM, b"", VALUES.tobytes()).add(N)
        count = len(ends)
        made.add(count, b"", np.array(ends, np.int32).tobytes())
        made.add(count, b"", np.array([4 * n for n in range(count + 1)], np.int32).tobytes(), b"user" * count)
        yield f"run-ends-{name}", (".arrows", stream("run-ends", batch(made)))
    for codec in ("lz4", "zstd"):
        true = packed(VALUES.tobytes(), codec)
        for name, wrong in {
            "claims-less": struct.pack("<q", 8) + true[8:],
            "claims-more": struct.pack("<q", VALUES.nbytes + 8) + true[8:],
            "claims-none": struct.pack("<q", 0) + true[8:],
            "claims-2^25": struct.pack("<q", 1 << 25) + true[8:],
            "claims-negative": struct.pack("<q", -2) + true[8:],
            "claims-lowest": struct.pack("<q", -(1 << 63)) + true[8:],
            "claims-plain": struct.pack("<q", -1) + true[8:],
            "plain": struct.pack("<q", -1) + VALUES.tobytes(),
            "seven-bytes": true[:7],
            "eight-bytes": true[:8],
            "cut": true[: len(true) // 2],
            "twice": true + true[8:],
            "other-codec": struct.pack("<q", VALUES.nbytes)
            + packed(VALUES.tobytes(), "lz4" if codec == "zstd" else "zstd")[8:],
            "bomb": packed(bytes(1 << 24), codec),
            "nothing": b"",
        }.items():
            made = Rows(N, codec=LZ4 if codec == "lz4" else ZSTD)
            made.add(N, b"", packed(IDS.tobytes(), codec)).add(N, b"").add(N * DIM, b"", wrong)
            yield f"{codec}-{name}", (".arrows", stream(codec, batch(made)))
    # Nobody's bytes: no buffers at all, and as many rows as one likes.
    for power in (20, 31, 40, 62):
        made = Rows(1 << power)
        made.add(1 << power, b"", b"", nulls=1 << power).add(1 << power, b"", nulls=1 << power)
        made.add(min(1 << power + 2, (1 << 63) - 1), b"", b"", nulls=min(1 << power + 2, (1 << 63) - 1))
        yield f"nothing-but-nulls-2^{power}", (".arrows", stream("plain", batch(made)))
        bits = Rows(1 << power).add(1 << power, bytes(8), bytes(8), nulls=1 << power)
        bits.add(1 << power, bytes(8), nulls=1 << power).add(N, b"", VALUES.tobytes())
        yield f"nulls-few-bytes-2^{power}", (".arrows", stream("plain", batch(bits)))


# ---- dictionaries


def dictionaries() -> Inputs:
    start, rest = message(SCHEMA, shape("dictionary")), batch(rows("dictionary")) + END
    both = dictionary(7, names("user", "item"))
    zeros = Rows(1, codec=ZSTD).add(1, b"", packed(struct.pack("<ii", 0, 4), "zstd"), packed(b"user", "zstd"))
    for name, told in {
        "missing": b"",
        "of-another": dictionary(8, names("user", "item")),
        "of-none": dictionary(-1, names("user", "item")),
        "twice": both + both,
        "late": b"",
        "empty": dictionary(7, names()),
        "short": dictionary(7, names("user")),
        "of-nulls": dictionary(7, Rows(2).add(2, b"\0", np.zeros(3, np.int32).tobytes(), b"", nulls=2)),
        "delta-first": dictionary(7, names("user", "item"), delta=True),
        "delta-after": dictionary(7, names("user")) + dictionary(7, names("item"), delta=True),
        "delta-of-another": both + dictionary(9, names("item"), delta=True),
        "packed": dictionary(7, zeros) + dictionary(7, names("item"), delta=True),
        "of-unknown-tables": dictionary(7, names("nobody", "nothing")),
        "same-twice": dictionary(7, names("user", "user")),
        "2000-deltas": both + dictionary(7, names("x"), delta=True) * 2000,
        "2000-times": both * 2000,
        "length-2^40": dictionary(7, Rows(1 << 40).add(1 << 40, b"", b"", b"")),
        "length-negative": dictionary(7, Rows(-1).add(-1, b"", b"", b"")),
        "no-buffers": dictionary(7, Rows(2).add(2)),
        "body-negative": dictionary(7, names("user"), body_length=-8),
        "body-2^40": dictionary(7, names("user"), body_length=1 << 40),
    }.items():
        yield f"dictionary-{name}", (".arrows", start + told + rest)
    yield "dictionary-after", (".arrows", start + batch(rows("dictionary")) + both + END)
    yield "dictionary-alone", (".arrows", start + both + END)
    # Each within what is allowed, and all of them held at once.
    offsets = packed(struct.pack("<ii", 0, 1 << 24), "zstd")
    large = Rows(1, codec=ZSTD).add(1, b"", offsets, packed(b"a" * (1 << 24), "zstd"))
    many = [column(f"d{n}", UTF8, {}, dictionary=codes(n)) for n in range(100, 140)]
    wide = schema([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", DIM)}, real()), *many], USER)
    told = b"".join(dictionary(n, large) for n in range(100, 140))
    made = rows("plain")
    for _ in many:
        made.add(N, b"", bytes(N))
    yield "dictionaries-640-mib", (".arrows", message(SCHEMA, wide) + told + batch(made) + END)
    deltas = dictionary(7, large) + dictionary(7, large, delta=True) * 39
    yield "deltas-640-mib", (".arrows", start + deltas + rest)
    nested = column("table", LIST, {}, column("item", UTF8, {}, dictionary=codes(7)), dictionary=codes(7))
    looped = schema([whole_number("id"), nested], USER)
    yield "dictionary-in-itself", (".arrows", message(SCHEMA, looped) + both + batch(rows("dictionary")) + END)
    twins = schema([whole_number("id", dictionary=codes(7)), column("gradient", UTF8, {}, dictionary=codes(7))], USER)
    yield "dictionary-of-two-types", (".arrows", message(SCHEMA, twins) + both + batch(rows("dictionary")) + END)


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
    for name, about in {"no-modes": {}, "ids": {0: ("h", 1), 1: Vector([struct.pack("<i", 300)])}}.items():
        yield f"union-{name}", of([column("id", UNION, about, whole_number("a")), gradient])
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
    start, one = message(SCHEMA, shape("plain")), batch(rows("plain"))
    true = rows("plain")
    for version in (-1, 0, 1, 2, 3, 5, 99):
        yield f"version-{version}", (".arrows", start + batch(true, version=version) + END)
        yield f"version-{version}-of-schema", (".arrows", message(SCHEMA, shape("plain"), version=version) + one + END)
    for kind in (0, 1, 2, 4, 5, 6, 255):
        yield f"header-{kind}", (".arrows", start + message(kind, true.table(), true.body) + END)
        yield f"header-{kind}-first", (".arrows", message(kind, shape("plain")) + one + END)
    yield "schema-with-a-body", (".arrows", message(SCHEMA, shape("plain"), bytes(64)) + one + END)
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
    legacy = struct.pack("<i", len(one) - 8 - len(true.body)) + one[8:]
    yield "legacy-inside", (".arrows", start + legacy + bytes(4))
    yield "markers-only", (".arrows", END * 3)
    yield "half-a-marker", (".arrows", start + one + END[:6])
    yield "marker-inside", (".arrows", start + one + END + one + END)
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
    for layout in ("plain", "dictionary", "zstd"):
        for name, change in {
            "batch-twice": lambda told: [*told, told[-1]],
            "batch-left-out": lambda told: told[:-1],
            "first-left-out": lambda told: [one for one in told if one[0] == "dictionary"] + told[-1:],
            "no-batches": lambda told: [],
            "batches-swapped": lambda told: told[:-2] + told[:-3:-1],
            "as-dictionaries": lambda told: [["dictionary", *one[1:]] for one in told],
            "as-batches": lambda told: [["batch", *one[1:]] for one in told],
            "no-dictionaries": lambda told: [one for one in told if one[0] == "batch"],
            "inside": lambda told: [[kind, at + 8, metadata, body] for kind, at, metadata, body in told],
            "before": lambda told: [[kind, at - 8, metadata, body] for kind, at, metadata, body in told],
            "short-metadata": lambda told: [[kind, at, 8, body] for kind, at, metadata, body in told],
            "no-metadata": lambda told: [[kind, at, 0, body] for kind, at, metadata, body in told],
            "negative-metadata": lambda told: [[kind, at, -8, body] for kind, at, metadata, body in told],
            "long-metadata": lambda told: [[kind, at, metadata + body, 0] for kind, at, metadata, body in told],
            "no-body": lambda told: [[kind, at, metadata, 0] for kind, at, metadata, body in told],
            "negative-body": lambda told: [[kind, at, metadata, -1] for kind, at, metadata, body in told],
            "long-body": lambda told: [[kind, at, metadata, body + 8] for kind, at, metadata, body in told],
            "at-the-schema": lambda told: [[kind, 8, metadata, body] for kind, at, metadata, body in told],
            "at-zero": lambda told: [[kind, 0, metadata, body] for kind, at, metadata, body in told],
            "unaligned": lambda told: [[kind, at + 1, metadata, body] for kind, at, metadata, body in told],
            "10000-times": lambda told: told + told[-1:] * 10_000,
        }.items():
            yield f"{layout}-footer-{name}", (".arrow", file(layout, blocks=change))
        for other in ("lists", "views", "run-ends", "dictionary", "plain"):
            if other != layout:
                yield f"{layout}-footer-schema-{other}", (".arrow", file(layout, footer_schema=shape(other)))
        wide = schema([whole_number("id", 8), column("gradient", FIXED_LIST, {0: ("i", 1 << 30)}, real())], USER)
        yield f"{layout}-footer-schema-wide", (".arrow", file(layout, footer_schema=wide))
