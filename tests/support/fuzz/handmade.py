"""Arrow IPC whose every number is a lie in turn: counts, lengths, offsets, kinds; and what only a hand would make.

Streams and files are written field by field (flat.py), so that each is well-formed but for what its name says.
"""

import copy
import operator
import struct

import numpy as np
from fuzz.flat import (
    END,
    FIXED_LIST,
    LIST,
    LZ4,
    SCHEMA,
    UTF8,
    ZSTD,
    Rows,
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
from fuzz.heads import footers, headers, schemas
from fuzz.truth import (
    DIM,
    IDS,
    LAYOUTS,
    LIST_OFFSETS,
    USER,
    VALUES,
    WRONG,
    Inputs,
    N,
    before,
    file,
    names,
    packed,
    rows,
    shape,
    stream,
)


def handmade_inputs() -> dict[str, tuple[str, bytes]]:
    """name → suffix and bytes"""
    return dict([*good(), *numbers(), *contents(), *dictionaries(), *schemas(), *headers(), *footers()])


def good() -> Inputs:
    """Those that nothing is wrong with, and two of a kind that is refused by name."""
    for layout in LAYOUTS:
        yield f"good-{layout}", (".arrows", stream(layout))
        yield f"good-{layout}-file", (".arrow", file(layout))
        yield f"good-{layout}-bare-file", (".arrow", file(layout, bare_schema=True))


# ---- every number, in turn


def numbers() -> Inputs:
    for layout in LAYOUTS:
        true = rows(layout)
        for name, change in lies(true):
            made = copy.deepcopy(true)
            change(made)
            yield f"{layout}-{name}", (".arrows", stream(layout, batch(made)))
            if name.endswith(("-2", "-5", "-8")):
                written = [*before(layout), ("batch", batch(made))]
                yield f"{layout}-{name}-file", (".arrow", ipc_file(shape(layout), written))
        for number, length in enumerate((*WRONG, len(true.body) - 8, len(true.body) + 8)):
            yield f"{layout}-body-{number}", (".arrows", stream(layout, batch(true, body_length=length)))


def lies(true: Rows):
    """name, and what makes rows lie"""
    body = len(true.body)
    for number, value in enumerate((*WRONG, N - 1, N + 1)):
        yield f"length-{number}", lambda made, value=value: setattr(made, "length", value)
        yield f"nodes-{number}", lambda made, value=value: setattr(made, "num_nodes", value & 0xFFFFFFFF)
        yield f"buffers-{number}", lambda made, value=value: setattr(made, "num_buffers", value & 0xFFFFFFFF)
        for index, (length, nulls) in enumerate(true.nodes):
            for what, pair in (("length", (value, nulls)), ("nulls", (length, value)), ("both", (value, value))):
                yield f"node-{index}-{what}-{number}", put("nodes", index, pair)
    for number, value in enumerate((*WRONG, body, body - 8, body + 8)):
        for index, (offset, length) in enumerate(true.buffers):
            for what, pair in (("offset", (value, length)), ("length", (offset, value)), ("both", (value, value))):
                yield f"buffer-{index}-{what}-{number}", put("buffers", index, pair)
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


def put(pairs: str, index: int, pair: tuple[int, int]):
    return lambda made: operator.setitem(getattr(made, pairs), index, pair)


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
    for number, (offset, size) in enumerate(
        ((-1, 4), (0, -1), (N * DIM, 1), (2**31 - 1, 2**31 - 1), (0, 2**31 - 1), (0, 0))
    ):
        made = Rows(N).add(N, b"", IDS.tobytes())
        made.add(N, b"", np.full(N, offset, np.int32).tobytes(), np.full(N, size, np.int32).tobytes())
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
    for ends in ([0], [-1], [N - 1], [N + 1], [2**31 - 1], [N, 3], [N, N]):
        made = Rows(N).add(N, b"", IDS.tobytes()).add(N, b"").add(N * DIM, b"", VALUES.tobytes()).add(N)
        count = len(ends)
        made.add(count, b"", np.array(ends, np.int32).tobytes())
        made.add(count, b"", np.array([4 * n for n in range(count + 1)], np.int32).tobytes(), b"user" * count)
        yield f"run-ends-{'-'.join(map(str, ends))}", (".arrows", stream("run-ends", batch(made)))
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
    # No buffers at all, and any number of rows.
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
    for name, written in {
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
        "of-unknown-tables": dictionary(7, names("absent", "nothing")),
        "same-twice": dictionary(7, names("user", "user")),
        "2000-deltas": both + dictionary(7, names("x"), delta=True) * 2000,
        "2000-times": both * 2000,
        "length-2^40": dictionary(7, Rows(1 << 40).add(1 << 40, b"", b"", b"")),
        "length-negative": dictionary(7, Rows(-1).add(-1, b"", b"", b"")),
        "no-buffers": dictionary(7, Rows(2).add(2)),
        "body-negative": dictionary(7, names("user"), body_length=-8),
        "body-2^40": dictionary(7, names("user"), body_length=1 << 40),
    }.items():
        yield f"dictionary-{name}", (".arrows", start + written + rest)
    yield "dictionary-after", (".arrows", start + batch(rows("dictionary")) + both + END)
    yield "dictionary-alone", (".arrows", start + both + END)
    # Each within what is allowed, and all of them held at once.
    offsets = packed(struct.pack("<ii", 0, 1 << 24), "zstd")
    large = Rows(1, codec=ZSTD).add(1, b"", offsets, packed(b"a" * (1 << 24), "zstd"))
    many = [column(f"d{n}", UTF8, {}, dictionary=codes(n)) for n in range(100, 140)]
    wide = schema([whole_number("id"), column("gradient", FIXED_LIST, {0: ("i", DIM)}, real()), *many], USER)
    written = b"".join(dictionary(n, large) for n in range(100, 140))
    made = rows("plain")
    for _ in many:
        made.add(N, b"", bytes(N))
    yield "dictionaries-640-mib", (".arrows", message(SCHEMA, wide) + written + batch(made) + END)
    deltas = dictionary(7, large) + dictionary(7, large, delta=True) * 39
    yield "deltas-640-mib", (".arrows", start + deltas + rest)
    nested = column("table", LIST, {}, column("item", UTF8, {}, dictionary=codes(7)), dictionary=codes(7))
    looped = schema([whole_number("id"), nested], USER)
    yield "dictionary-in-itself", (".arrows", message(SCHEMA, looped) + both + batch(rows("dictionary")) + END)
    twins = schema([whole_number("id", dictionary=codes(7)), column("gradient", UTF8, {}, dictionary=codes(7))], USER)
    yield "dictionary-of-two-types", (".arrows", message(SCHEMA, twins) + both + batch(rows("dictionary")) + END)
