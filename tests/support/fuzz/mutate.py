"""Ways to damage the bytes of an input; every choice is drawn from the generator of the case.

Some know where things lie (messages, metadata, offsets, names), so that the damage gets past the first look.
"""

import random
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from fuzz.seeds import DIM, NUM_ROWS, Seed

Damage = Callable[[bytes, random.Random], bytes]

EXTREMES = (0, 1, 2, 7, 8, 127, 128, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
LARGE = (*EXTREMES, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
NAMES = (b"gradient", b"table", b"step", b"user", b"item", b"id", b"contributor", b"penstock.log", b"penstock.crc")
ZSTD, LZ4 = b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"


def mutate(seed: Seed, rng: random.Random) -> tuple[str, bytes]:
    """One to three damages, one after the other. Returns their names and the bytes."""
    known = _damages(seed)
    names, content = [], seed.content
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        damage = rng.choice(known)
        names.append(damage.__name__)
        content = damage(content, rng) or content
    return "+".join(names), content


def _damages(seed: Seed) -> list[Damage]:
    anywhere = [flip_bits, byte_run, truncate, cut_out, repeat, insert, number]
    if seed.is_config:
        return [*anywhere, flip_bits, text_number, name]
    if seed.suffix == ".parquet":
        return [*anywhere, footer_byte, footer_byte, page_header, name, truncate_at_magic]
    special = [metadata_number, metadata_number, metadata_byte, boundary, body_number, offsets, name, message]
    if "zstd" in seed.name or "lz4" in seed.name:
        special += [compressed_length, compressed_length]
    return [*anywhere, *special, *special]


# ---- anywhere


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def byte_run(data: bytes, rng: random.Random) -> bytes:
    offset, length = _place(data, rng), rng.choice((1, 2, 4, 8, 64))
    return (
        data[:offset]
        + bytes([rng.choice((0, 1, 127, 128, 255))]) * len(data[offset : offset + length])
        + data[offset + length :]
    )


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    offset = _place(data, rng)
    return data[:offset] + data[offset + rng.choice((1, 4, 8, 64, 500)) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    offset, length = _place(data, rng), rng.choice((8, 64, 1000, len(data)))
    return data[:offset] + data[max(0, offset - length) : offset] + data[offset:]


def insert(data: bytes, rng: random.Random) -> bytes:
    offset = _place(data, rng)
    return data[:offset] + rng.randbytes(rng.choice((1, 4, 8, 64))) + data[offset:]


def number(data: bytes, rng: random.Random) -> bytes:
    return _put(data, _place(data, rng) & ~3, rng)


# ---- Arrow IPC


def messages(data: bytes) -> list[tuple[int, int, int]]:
    """Where the messages of a stream or file lie, as far as they can be followed: start, body, end."""
    offset = 8 if data.startswith(b"ARROW1") else 0
    results = []
    while offset + 8 <= len(data):
        marker, length = struct.unpack_from("<Ii", data, offset)
        if marker != 0xFFFFFFFF or length <= 0 or offset + 8 + length > len(data):
            break
        try:
            whole = pa.ipc.read_message(pa.py_buffer(data[offset:]))
        except (pa.ArrowException, OSError, EOFError):
            break
        body = offset + 8 + length
        end = body + (0 if whole.body is None else whole.body.size)
        results.append((offset, body, end))
        offset = end
    return results


def metadata_number(data: bytes, rng: random.Random) -> bytes:
    start, body, _ = _message(data, rng)
    return _put(data, rng.randrange(start, max(start + 1, body)) & ~3, rng)


def metadata_byte(data: bytes, rng: random.Random) -> bytes:
    start, body, _ = _message(data, rng)
    offset = rng.randrange(start, max(start + 1, body))
    return data[:offset] + bytes([rng.choice((0, 1, 2, 3, 4, 5, 14, 22, 255, rng.randrange(256)))]) + data[offset + 1 :]


def boundary(data: bytes, rng: random.Random) -> bytes:
    """Cut at, or next to, a place where something begins."""
    offset = rng.choice(_message(data, rng)) + rng.choice((-8, -1, 0, 1, 4, 7, 8, 9, 12, 16))
    return data[: max(0, offset)]


def body_number(data: bytes, rng: random.Random) -> bytes:
    _, body, end = _message(data, rng)
    return _put(data, rng.randrange(body, max(body + 1, end)) & ~3, rng)


def offsets(data: bytes, rng: random.Random) -> bytes:
    """Offsets of lists, or indices of a dictionary, that go back, are negative, or lie beyond."""
    known = np.arange(0, NUM_ROWS * DIM + 1, DIM, dtype=np.int32).tobytes()
    indices = np.tile(np.array([0, 1], np.int32), NUM_ROWS // 2).tobytes()
    places = [
        position
        for position in (data.find(known), data.find(indices), data.rfind(known), data.rfind(indices))
        if position >= 0
    ]
    if not places:
        return body_number(data, rng)
    offset = rng.choice(places) + 4 * rng.randrange(NUM_ROWS)
    return (
        data[:offset]
        + struct.pack("<i", rng.choice((-1, -(1 << 31), (1 << 31) - 1, 2, 97, 1000, 0)))
        + data[offset + 4 :]
    )


def message(data: bytes, rng: random.Random) -> bytes:
    """A message removed, repeated or moved: schemas in the middle, dictionaries replaced."""
    start, _, end = _message(data, rng)
    other = rng.choice(_message(data, rng))
    first = data[start:end]
    kind = rng.randrange(3)
    if kind == 0:
        return data[:start] + data[end:]
    if kind == 1:
        return data[:end] + first + data[end:]
    return data[:other] + first + data[other:]


def compressed_length(data: bytes, rng: random.Random) -> bytes:
    """Of a compressed buffer, how long it says it will be."""
    places = []
    for magic in (ZSTD, LZ4):
        offset = data.find(magic)
        while offset >= 8:
            places.append(offset - 8)
            offset = data.find(magic, offset + 1)
    if not places:
        return data
    offset = rng.choice(places)
    (length,) = struct.unpack_from("<q", data, offset)
    length = rng.choice((0, -1, -2, length - 1, length + 1, length * 2, 1 << 28, 1 << 31, 1 << 33, 1 << 40, 1 << 62))
    return data[:offset] + struct.pack("<q", length) + data[offset + 8 :]


# ---- Parquet


def footer_byte(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    offset = len(data) - 8 - rng.randrange(max(1, min(length, len(data) - 12)))
    value = rng.choice((0, 1, 2, 0x15, 0x16, 0x19, 0x1C, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
    return data[: offset - 1] + bytes([value]) + data[offset:]


def page_header(data: bytes, rng: random.Random) -> bytes:
    """The first bytes of a page: 0x15 begins the struct of every header (its type, an i32)."""
    places = [first for first in range(4, max(5, len(data) - 200)) if data[first : first + 1] == b"\x15"]
    offset = rng.choice(places or [4]) + rng.randrange(24)
    huge = rng.choice(
        (b"\xff\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08", b"\x00", b"\x01", b"\xff")
    )
    return data[:offset] + huge + data[offset + rng.choice((1, len(huge))) :]


def truncate_at_magic(data: bytes, rng: random.Random) -> bytes:
    return data[: -rng.choice((1, 4, 8, 9))] + rng.choice((b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"PARE"))


# ---- configurations and names


def text_number(data: bytes, rng: random.Random) -> bytes:
    digits = [index for index, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return flip_bits(data, rng)
    offset = rng.choice(digits)
    new = rng.choice((b"-1", b"0", b"1e400", b"9999999999999999999999", b"nan", b"2147483648", b"''", b"{}", b""))
    return data[:offset] + new + data[offset + 1 :]


def name(data: bytes, rng: random.Random) -> bytes:
    """A name that is not UTF-8, holds a zero, or is another."""
    wanted = rng.choice([n for n in NAMES if n in data] or [data[:1]])
    offset = data.find(wanted) if rng.random() < 0.5 else data.rfind(wanted)
    new = rng.choice((b"\xff", b"\0", b"\xc0\x80", b"\xed\xa0\x80", b"x", b"\n"))
    new = (new * len(wanted))[: len(wanted)] if rng.random() < 0.5 else new[: len(wanted)] + wanted[len(new) :]
    return data[:offset] + new + data[offset + len(wanted) :]


# ---- inside


def _place(data: bytes, rng: random.Random) -> int:
    return rng.randrange(len(data)) if data else 0


def _message(data: bytes, rng: random.Random) -> tuple[int, int, int]:
    return rng.choice(messages(data) or [(0, len(data), len(data))])


def _put(data: bytes, offset: int, rng: random.Random) -> bytes:
    """A number instead of the one that stands there, or near to it."""
    width = rng.choice((4, 8))
    if len(data) < offset + width:
        return data
    old = int.from_bytes(data[offset : offset + width], "little")
    new = rng.choice((*LARGE, old + 1, old - 1, old * 2, -old)) % (1 << 8 * width)
    return data[:offset] + new.to_bytes(width, "little") + data[offset + width :]
