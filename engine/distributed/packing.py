"""What the processes tell each other of a round: entries as bytes, and back.

A message is the length of a header (uint64), the header (JSON), and arrays in the order that the header's entries say,
each begun at a multiple of 8 bytes. Both ends are of one job: it is not checked again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.distributed.peers import Piece
from penstock.frames import Frame, Rows
from penstock.tables.shares import Share

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Routed = Mapping[str, tuple[Int64, Float32]]  # table → numbers at their owner, gradients

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Entry:
    """What there is of one source in one round: a frame, an error, or its end.

    about : plain data, the same for everybody
    routed : by rank, the rows of the frame that are that process's
    bad : the frame's bad rows for the quarantine, which process 0 writes: an Arrow stream, or nothing
    """

    about: Mapping[str, Any]
    routed: Sequence[Routed] = ()
    bad: Piece = b""


@dataclass(frozen=True)
class Received:
    """An entry as the process that a message is for sees it."""

    about: Mapping[str, Any]
    rows: Routed = field(default_factory=dict)
    bad: Piece = b""

    def frame(self, dims: Mapping[str, int], bad_rows: tuple[Any, ...]) -> Frame:
        """The frame, with this process's rows of it: of every table that it has rows of, if only none here."""
        about, nothing = self.about, np.zeros(0, np.int64)
        rows = {
            table: (Rows(*self.rows.get(table, (nothing, np.zeros((0, dims[table]), np.float32)))),)
            for table in about["tables"]
        }
        return Frame(
            rows,
            about["num_rows"],
            about["step"],
            about["contributor"],
            None if about["rates"] is None else tuple(about["rates"]),
            about["dropped"],
            about["name"],
            bad_rows,
            truncated=about["truncated"],
            fingerprint=about["fingerprint"],
        )


def routed(frame: Frame, shares: Mapping[str, Share]) -> list[dict[str, tuple[Int64, Float32]]]:
    """A frame's rows by rank, those of a table in one block, in the order in which they came."""
    count = next(iter(shares.values())).count
    out: list[dict[str, tuple[Int64, Float32]]] = [{} for _ in range(count)]
    for table, blocks in frame.rows.items():
        pieces: list[list[tuple[Int64, Float32]]] = [[] for _ in range(count)]
        for block in blocks:
            ranks, numbers = shares[table].locate(np.ascontiguousarray(block.ids))
            for rank in range(count):
                places = np.flatnonzero(ranks == rank)
                if len(places):
                    of = places if block.which is None else block.which[places]
                    pieces[rank].append((numbers[places], _gained(block.grads[of], block.gains, places)))
        for rank, found in enumerate(pieces):
            if found:
                ids, grads = zip(*found, strict=True)
                out[rank][table] = (np.concatenate(ids), np.concatenate(grads)) if len(found) > 1 else found[0]
    return out


def _gained(grads: Float32, gains: Float32 | None, places: Int64) -> Float32:
    """Rows as they are summed: a gain is multiplied in, rounded to float32, as the accumulator does it."""
    return grads if gains is None else grads * gains[places, None]


def packed(head: Mapping[str, Any], entries: Sequence[Entry], rank: int) -> list[Piece]:
    """The message of a round for one process."""
    told: list[dict[str, Any]] = []
    arrays: list[Piece] = []
    for entry in entries:
        rows = entry.routed[rank] if entry.routed else {}
        bad = entry.bad if rank == 0 else b""
        blocks = [[table, len(ids), grads.shape[1]] for table, (ids, grads) in rows.items()]
        told.append({"about": entry.about, "blocks": blocks, "bad": len(bad)})
        for ids, grads in rows.values():
            arrays += [bytes_of(ids), bytes_of(grads)]
        arrays.append(bad)
    return joined({**head, "entries": told}, arrays)


def unpacked(message: bytearray) -> tuple[dict[str, Any], list[Received]]:
    """What ``packed`` made: the head and the entries. The arrays look into the message."""
    opened = Opened(message)
    entries = []
    for told in opened.header.pop("entries"):
        rows = {table: (opened.ids(number), opened.rows(number, dim)) for table, number, dim in told["blocks"]}
        entries.append(Received(told["about"], rows, opened.piece(told["bad"])))
    return opened.header, entries


def for_oneself(entry: Entry, rank: int) -> Received:
    """What a process keeps of its own entry."""
    return Received(entry.about, entry.routed[rank] if entry.routed else {}, entry.bad if rank == 0 else b"")


def joined(header: Mapping[str, Any], arrays: Sequence[Piece]) -> list[Piece]:
    """A message. header : plain data, which says what the arrays are"""
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + _LENGTH.size) % 8)
    pieces: list[Piece] = [_LENGTH.pack(len(head)) + head]
    for array in arrays:
        pieces += [array, bytes(-len(array) % 8)]
    return [piece for piece in pieces if len(piece)]


class Opened:
    """What ``joined`` made. Its arrays are asked for in their order, and look into the message."""

    def __init__(self, message: bytearray) -> None:
        (length,) = _LENGTH.unpack_from(message)
        self._message, self._at = message, _LENGTH.size + length
        self.header: dict[str, Any] = json.loads(message[_LENGTH.size : self._at])

    def ids(self, number: int) -> Int64:
        return np.frombuffer(self.piece(8 * number), np.int64)

    def rows(self, number: int, dim: int) -> Float32:
        return np.frombuffer(self.piece(4 * number * dim), np.float32).reshape(number, dim)

    def piece(self, num_bytes: int) -> memoryview:
        start = self._at
        self._at += num_bytes + -num_bytes % 8
        return memoryview(self._message)[start : start + num_bytes]


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
