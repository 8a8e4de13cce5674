"""Arrow IPC messages made by hand, so that every number in them can be a lie. No flatbuffers, no pyarrow.

A message is a tree of Table, Vector and text, written as a flatbuffer; fields go by their numbers in Arrow's
Message.fbs and Schema.fbs.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
INT, FLOAT, UTF8, LIST, STRUCT, UNION, FIXED_LIST, RUN_ENDS, TEXT_VIEW, LIST_VIEW = 2, 3, 5, 12, 13, 14, 16, 22, 24, 25
LZ4, ZSTD = 0, 1
END = struct.pack("<Ii", 0xFFFFFFFF, 0)


@dataclass
class Table:
    """fields : number → (struct's letter, value), or what an offset leads to"""

    fields: dict[int, Any]


@dataclass
class Vector:
    """items : structs as bytes, or what offsets lead to; count : how many it says there are, None for the truth"""

    items: list[Any]
    count: int | None = None


def flatbuffer(root: Table) -> bytes:
    out = bytearray(4)
    waiting: list[tuple[int, Any]] = [(0, root)]
    written: dict[int, int] = {}  # what others share is written once, behind the first of them
    while waiting:
        slot, thing = waiting.pop(0)
        start = written.get(id(thing), -1)
        if start <= slot:
            start = _table(out, thing, waiting) if isinstance(thing, Table) else _vector(out, thing, waiting)
            written[id(thing)] = start
        struct.pack_into("<I", out, slot, start - slot)
    return bytes(out) + bytes(-len(out) % 8)


def _table(out: bytearray, table: Table, waiting: list[tuple[int, Any]]) -> int:
    most = max(table.fields, default=-1) + 1
    places, size = [0] * most, 4
    for number, value in table.fields.items():
        width = struct.calcsize(value[0]) if isinstance(value, tuple) else 4
        places[number] = size = size + -size % width
        size += width
    out += bytes(-(len(out) + 4 + 2 * most) % 8)
    vtable = len(out)
    out += struct.pack(f"<HH{most}H", 4 + 2 * most, size, *places)
    start = len(out)
    out += struct.pack("<i", start - vtable) + bytes(size - 4)
    for number, value in table.fields.items():
        if isinstance(value, tuple):
            struct.pack_into("<" + value[0], out, start + places[number], value[1])
        else:
            waiting.append((start + places[number], value))
    return start


def _vector(out: bytearray, thing: Vector | str, waiting: list[tuple[int, Any]]) -> int:
    out += bytes(-(len(out) + 4) % 8)
    start = len(out)
    if isinstance(thing, str):
        out += struct.pack("<I", len(thing.encode())) + thing.encode() + b"\0"
        return start
    out += struct.pack("<I", len(thing.items) if thing.count is None else thing.count)
    for item in thing.items:
        if isinstance(item, bytes):
            out += item
        else:
            waiting.append((len(out), item))
            out += bytes(4)
    return start


# ---- schemas


def column(name: str, kind: int, details: dict[int, Any], *children: Table, dictionary: Table | None = None) -> Table:
    fields = {0: name, 1: ("?", True), 2: ("B", kind), 3: Table(details), 5: Vector(list(children))}
    return Table(fields if dictionary is None else fields | {4: dictionary})


def whole_number(name: str, bits: int = 64, dictionary: Table | None = None) -> Table:
    return column(name, INT, {0: ("i", bits), 1: ("?", True)}, dictionary=dictionary)


def real(name: str = "item") -> Table:
    return column(name, FLOAT, {0: ("h", 1)})


def codes(number: int, bits: int = 8) -> Table:
    """That a column is one of dictionary ``number``."""
    return Table({0: ("q", number), 1: Table({0: ("i", bits), 1: ("?", True)})})


def schema(columns: list[Table], metadata: dict[str, str], endianness: int = 0) -> Table:
    pairs = [Table({0: key, 1: value}) for key, value in metadata.items()]
    return Table({0: ("h", endianness), 1: Vector(list(columns)), 2: Vector(pairs)})


# ---- messages


@dataclass
class Rows:
    """A record batch: its numbers and its body, valid until a caller changes them.

    nodes : (length, nulls) of every column and child; buffers : (offset, length) of the body
    """

    length: int
    nodes: list[tuple[int, int]] = field(default_factory=list)
    buffers: list[tuple[int, int]] = field(default_factory=list)
    body: bytes = b""
    views: list[int] = field(default_factory=list)
    codec: int | None = None
    method: int = 0
    num_nodes: int | None = None
    num_buffers: int | None = None

    def add(self, length: int, *buffers: bytes, nulls: int = 0) -> "Rows":
        """One more column or child."""
        self.nodes.append((length, nulls))
        for buffer in buffers:
            self.buffers.append((len(self.body), len(buffer)))
            self.body += buffer + bytes(-len(buffer) % 8)
        return self

    def table(self) -> Table:
        nodes = Vector([struct.pack("<qq", *node) for node in self.nodes], self.num_nodes)
        buffers = Vector([struct.pack("<qq", *buffer) for buffer in self.buffers], self.num_buffers)
        fields: dict[int, Any] = {0: ("q", self.length), 1: nodes, 2: buffers}
        if self.codec is not None:
            fields[3] = Table({0: ("b", self.codec), 1: ("b", self.method)})
        if self.views:
            fields[4] = Vector([struct.pack("<q", count) for count in self.views])
        return Table(fields)


def message(kind: int, header: Table, body: bytes = b"", body_length: int | None = None, version: int = 4) -> bytes:
    length = len(body) if body_length is None else body_length
    metadata = flatbuffer(Table({0: ("h", version), 1: ("B", kind), 2: header, 3: ("q", length)}))
    return struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + metadata + body


def batch(rows: Rows, **lies: Any) -> bytes:
    return message(BATCH, rows.table(), rows.body, **lies)


def dictionary(number: int, rows: Rows, delta: bool = False, **lies: Any) -> bytes:
    header = Table({0: ("q", number), 1: rows.table(), 2: ("?", delta)})
    return message(DICTIONARY, header, rows.body, **lies)


# ---- files


def ipc_file(
    shape: Table,
    messages: list[tuple[str, bytes]],
    blocks: Any = None,
    footer_schema: Any = None,
    bare_schema: bool = False,
) -> bytes:
    """messages : ("dictionary" or "batch", bytes); blocks : changes what the footer says: a list of
    [kind, offset, metadata bytes, body bytes]; bare_schema : the first message has no length, as polars writes it"""
    out = b"ARROW1\0\0" + message(SCHEMA, shape)[8 if bare_schema else 0 :]
    records = []
    for kind, item in messages:
        metadata = 8 + struct.unpack_from("<i", item, 4)[0]
        records.append([kind, len(out), metadata, len(item) - metadata])
        out += item
    records = blocks(records) if blocks else records
    vectors = [
        Vector([struct.pack("<qiiq", offset, metadata, 0, body) for k, offset, metadata, body in records if k == kind])
        for kind in ("dictionary", "batch")
    ]
    footer = flatbuffer(Table({0: ("h", 4), 1: footer_schema or shape, 2: vectors[0], 3: vectors[1]}))
    return out + END + footer + struct.pack("<i", len(footer)) + b"ARROW1"
