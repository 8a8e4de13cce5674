"""The format of a line: one physical row of a device's arrays, its planes, and the rows that share it.

A line has ``width`` elements per plane: plane 0 holds weights, the others slots. On a CPU or GPU it holds one row. On a
TPU its width is a multiple of 128, and short rows share it (``packed``). bfloat16 weights are stored two per word, so
twice as many rows share a line (``halves``), each with separate slots.

Slots of one number per row (``row_slots``) follow the weights of a line on a CPU or GPU, so that one gather and one
scatter move both. On a TPU they lie outside the lines: each is an array of one axis, a float per row in the order of
the rows, which no tile pads. Among planes, such a slot is (n, group), after the planes of the line.

Gradients arrive in a line as float32 bits, or UNTOUCHED where there is none: a NaN that no arithmetic produces. So a
gradient of 0 is a gradient, the other rows of a line stay unchanged, and no mask is copied to the device.

A TPU lays out the last two axes of an array in tiles of (8, 128), or (4 | 2 | 1, 128) for an axis of that size. So a
plane wider than 128 is several strips of that width, and the strips of a line are distributed over arrays of 8, 4, 2
and 1: the three planes of Adam are two arrays, and no byte is padding.

XLA's scatter treats an array of one strip as a matrix, whose tiles hold 8 lines, and fetches and writes a whole tile
for each line. For XLA such an array is stored as the halves of its words, ``int16[lines, 2, 128]`` (``halved``): the
same bytes, in tiles of one line each.

``_by_line`` fixes the memory layout of the lines that a step writes back. By default XLA keeps all first strips, then
all second ones, and converts them to lines at the end: on v5p in HBM, not on the chip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout as in_memory

from penstock.bridge.stochastic_rounding import Places
from penstock.frames import Int32, Int64

Planes = list[jax.Array]
Arrays = tuple[jax.Array, ...]

# A quiet NaN with a payload. Arithmetic produces 0x7FC00000 or an operand's payload, and operands are finite.
UNTOUCHED = 0x7FE5A5A5
# Two bfloat16 weights of 1.0, and as a float32 about 1.
TWO_ONES = 0x3F803F80


@dataclass(frozen=True)
class Line:
    """The format of a table's lines; hashable, as a key of the program cache.

    places : of a table with bfloat16 weights; else None
    halved : store an array of one strip as the halves of its words
    row_slots : a slot has one number per row; else it is a plane
    """

    dim: int
    num_slots: int
    lanes: int = 1
    places: Places | None = None
    halved: bool = False
    row_slots: bool = False

    @property
    def width(self) -> int:
        return -(-self.dim // self.lanes) * self.lanes

    @property
    def packed(self) -> int:
        """Number of rows side by side in a plane."""
        return max(1, self.lanes // self.dim)

    @property
    def halves(self) -> int:
        """Number of weights in a word."""
        return 1 if self.places is None else 2

    @property
    def group(self) -> int:
        """Number of rows in a line."""
        return self.packed * self.halves

    @property
    def masked(self) -> bool:
        """Whether a line may contain elements that a gradient of one of its rows does not touch."""
        return self.lanes > 1 or self.group > 1

    @property
    def strip(self) -> int:
        """Size of the arrays' last axis: the width of a plane, or on a TPU that of a register."""
        return self.width if self.lanes == 1 else self.lanes

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of strips of a line in each of the arrays of lines."""
        planes = 1 + (0 if self.row_slots else self.num_slots * self.halves)
        strips = planes * (self.width // self.strip)
        if self.lanes == 1:
            return (strips,)
        eights, rest = strips & ~7, strips & 7
        return tuple(part for part in (eights, *(rest & bit for bit in (4, 2, 1))) if part)

    @property
    def dtype(self) -> Any:
        return jnp.float32 if self.halves == 1 else jnp.int32

    @property
    def slots_follow(self) -> bool:
        """Whether slots of one number per row follow the weights of their line."""
        return self.row_slots and self.lanes == 1

    @property
    def forms(self) -> tuple[tuple[tuple[int, int], Any], ...]:
        """(shape, dtype) of a line in each of the arrays of lines."""
        if self.slots_follow:
            return (((1, self.width + self.num_slots * self.group), self.dtype),)
        cut = self.halved and self.lanes > 1
        return tuple(
            ((2, self.strip), np.int16) if cut and strips == 1 else ((strips, self.strip), self.dtype)
            for strips in self.groups
        )

    def arrays(self, num_lines: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """(shape, dtype) of the arrays of that many lines: those of lines, then the slots of one number per row."""
        of_rows = ((num_lines * self.group,), jnp.float32)
        slots = (of_rows,) * self.num_slots if self.row_slots and not self.slots_follow else ()
        return (*(((num_lines, *shape), dtype) for shape, dtype in self.forms), *slots)

    def nbytes(self, num_lines: int) -> int:
        """Return the bytes of the arrays of that many lines."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.arrays(num_lines))

    def offsets(self, rows: Int32) -> Int64:
        """Return the offset of each of a device's rows in the ``halves * width`` words of its line."""
        inside = rows.astype(np.int64) % self.group
        return inside // self.packed * self.width + inside % self.packed * self.dim

    # ---- on the device

    def gather(self, arrays: Arrays, lines: jax.Array) -> Planes:
        """Return the planes of lines, which may repeat; pads lie beyond the arrays.

        Where rows share lines pads read ones: a division by a zero accumulator would trip jax_debug_nans, though their
        update is dropped. Elsewhere they read the last line: on a GPU the ones would be a separate kernel.
        """
        mode = "clip" if self.lanes == 1 else "fill"
        fills = {jnp.dtype(jnp.float32): 1.0, jnp.dtype(jnp.int32): TWO_ONES, jnp.dtype(jnp.int16): TWO_ONES & 0x7FFF}
        places = [lines] * len(self.groups) + [self.rows_of(lines)] * (len(arrays) - len(self.groups))
        return self.planes(
            [a.at[place].get(mode=mode, fill_value=fills[a.dtype]) for a, place in zip(arrays, places, strict=True)]
        )

    def scatter(self, arrays: Arrays, lines: jax.Array, planes: Planes) -> Arrays:
        """Return the arrays with the planes of lines written back, in place if the arrays are donated."""
        places = [lines] * len(self.groups) + [self.rows_of(lines)] * (len(arrays) - len(self.groups))
        return tuple(
            array.at[place].set(new, mode="drop", unique_indices=True)
            for array, place, new in zip(arrays, places, self.stacked(planes), strict=True)
        )

    def rows_of(self, lines: jax.Array) -> jax.Array:
        """Return the numbers of the rows of lines: (n,) → (n, group)."""
        return lines[:, None] * self.group + jnp.arange(self.group, dtype=lines.dtype)

    def planes(self, parts: Sequence[jax.Array]) -> Planes:
        """Return lines gathered from each of the arrays as planes (n, width), and slots of one number per row."""
        lines, slots = parts[: len(self.groups)], parts[len(self.groups) :]
        if self.slots_follow:
            ends = [self.width + slot * self.group for slot in range(self.num_slots)]
            weights, *slots = jnp.split(lines[0][:, 0], ends, axis=1)
            return [weights, *(slots if self.halves == 1 else map(floats_of, slots))]
        if self.forms[-1][1] == np.int16:  # an array of one strip, the last
            whole = joined_halves(lines[-1])
            lines = [*lines[:-1], whole if self.halves > 1 else floats_of(whole)]
        return [*self.join_strips([part[:, number] for part in lines for number in range(part.shape[1])]), *slots]

    def stacked(self, planes: Planes) -> list[jax.Array]:
        """Return planes as lines of each of the arrays: the inverse of ``planes``."""
        by_line = _by_line if self.lanes > 1 else lambda part: part
        slots: Planes = []
        if self.slots_follow:
            weights, *slots = planes
            return [jnp.concatenate([weights, *(slots if self.halves == 1 else map(bits_of, slots))], axis=1)[:, None]]
        if self.row_slots:
            planes, slots = planes[:1], planes[1:]
        strips, ends = [by_line(strip) for strip in self.strips_of(planes)], accumulate(self.groups, initial=0)
        parts = [jnp.stack(strips[start:end], axis=1) for start, end in pairwise(ends)]
        lines = [
            by_line(halves_of(part) if dtype == np.int16 else part)
            for part, (_, dtype) in zip(parts, self.forms, strict=True)
        ]
        return [*lines, *slots]

    def join_strips(self, strips: Planes) -> Planes:
        """Return strips (n, strip) as planes."""
        each = self.width // self.strip
        if each == 1:
            return strips
        return [jnp.concatenate(strips[start : start + each], axis=1) for start in range(0, len(strips), each)]

    def strips_of(self, planes: Planes) -> Planes:
        """Return planes as strips."""
        starts = range(0, self.width, self.strip)
        return [plane[:, s : s + self.strip] for plane in planes for s in starts] if len(starts) > 1 else planes

    def unpack(self, planes: Planes) -> list[Planes]:
        """Return [weights, *slots] as float32, for each half of the rows: (n, width), slots per row (n, packed)."""
        if self.halves == 1:
            return [planes]
        word, *rest = planes
        if self.row_slots:
            slots = [[slot[:, half * self.packed :][:, : self.packed] for slot in rest] for half in range(2)]
        else:
            slots = [[floats_of(slot) for slot in rest[half::2]] for half in range(2)]
        low, high = jax.lax.shift_left(word, 16), word & np.int32(-0x10000)
        return [[floats_of(weights), *slots[half]] for half, weights in enumerate((low, high))]

    def pack(self, rows: Sequence[Planes]) -> Planes:
        """Return planes from the result of ``unpack``; bfloat16 weights must already be rounded."""
        if self.halves == 1:
            return rows[0]
        (low, *low_slots), (high, *high_slots) = rows
        word = jax.lax.shift_right_logical(bits_of(low), 16) | bits_of(high)
        pairs = list(zip(low_slots, high_slots, strict=True))
        if self.row_slots:
            return [word, *(jnp.concatenate(pair, axis=1) for pair in pairs)]
        return [word, *(bits_of(plane) for pair in pairs for plane in pair)]

    def received(self, words: jax.Array) -> list[tuple[jax.Array, jax.Array | None]]:
        """Return (gradients, touched), float32 and bool (n, width), for each half of the rows.

        words : int32 (n, halves * width). touched is None if all elements are.
        """
        if not self.masked:
            return [(floats_of(words), None)]
        halves = [words[:, half * self.width : (half + 1) * self.width] for half in range(self.halves)]
        touched = [half != UNTOUCHED for half in halves]
        return [(floats_of(jnp.where(t, half, 0)), t) for half, t in zip(halves, touched, strict=True)]

    def rows(self, plane: jax.Array) -> jax.Array:
        """Return the rows of a plane: (n, width) → (n * packed, dim); or the rows of a slot, (n * packed, 1)."""
        if plane.shape[1] < self.width:  # a slot of one number per row
            return plane.reshape(-1, 1)
        return plane[:, : self.packed * self.dim].reshape(-1, self.dim)

    def like_slots(self, *planes: Any) -> Sequence[Any]:
        """Return planes (n, width) as slots have them: with one number per row, the first of each row, (n, packed)."""
        if not self.row_slots:
            return planes
        return [None if plane is None else plane[:, : self.packed * self.dim : self.dim] for plane in planes]

    def plane(self, rows: jax.Array) -> jax.Array:
        """Return rows as a plane: the inverse of ``rows``, except that padding elements are 0."""
        if rows.shape[1] < self.dim:
            return rows.reshape(-1, self.packed)
        side_by_side = rows.reshape(-1, self.packed * self.dim)
        return jnp.pad(side_by_side, ((0, 0), (0, self.width - side_by_side.shape[1])))

    def spread(self, rows: jax.Array, inside: jax.Array) -> jax.Array:
        """Return each of rows (n, dim) in a separate line: (n, width), 0 elsewhere. inside : as for ``pick``"""
        repeated = jnp.tile(rows, (1, self.packed))
        places = np.arange(repeated.shape[1], dtype=np.int32) // self.dim
        return jnp.pad(jnp.where(inside[:, None] == places, repeated, 0), ((0, 0), (0, self.width - len(places))))

    def of_half(self, rows: jax.Array, half: int) -> jax.Array:
        """Expand a value per row of a line, (n, group), to the elements of a half's planes, (n, width); pads are 0."""
        elements = jnp.repeat(rows[:, half * self.packed : (half + 1) * self.packed], self.dim, axis=1)
        return jnp.pad(elements, ((0, 0), (0, self.width - elements.shape[1])))

    def pick(self, planes: Sequence[jax.Array], inside: jax.Array) -> list[jax.Array]:
        """Return one row of each plane's line, (n, dim) or (n, 1). inside : int32 (n,), which of the packed rows

        It selects among the rows of whole lines, because a TPU would gather single elements one by one. The words of
        the other rows become 0, so the sum has the bits of the selected one.
        """
        if self.packed == 1:
            return [plane[:, : self.dim] for plane in planes]
        selected = (inside[:, None] == jnp.arange(self.packed))[:, :, None]
        rows = [self.rows(plane) for plane in planes]
        words = [bits_of(part).reshape(-1, self.packed, part.shape[1]) for part in rows]
        return [floats_of(jnp.where(selected, bits, 0).sum(axis=1)) for bits in words]


def _by_line(part: jax.Array) -> jax.Array:
    """Return ``part`` with its axes laid out in memory in their order: line after line."""
    out: jax.Array = in_memory.with_layout_constraint(part, in_memory.Layout(tuple(range(part.ndim))))
    return out


# ---- the 32-bit words of arrays: as the bits of floats, and as halves of 16 bits


def floats_of(words: jax.Array) -> jax.Array:
    """Return the floats whose bits are words."""
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def bits_of(floats: jax.Array) -> jax.Array:
    """Return the bits of floats as int32."""
    return jax.lax.bitcast_convert_type(floats, jnp.int32)


def halves_of(words: jax.Array) -> jax.Array:
    """Return words, (n, 1, strip) of int32 or float32, as int16 (n, 2, strip), the low halves first."""
    words = words if words.dtype == jnp.int32 else bits_of(words)
    return (words >> np.array([[0], [16]], np.int32)).astype(jnp.int16)


def joined_halves(pairs: jax.Array) -> jax.Array:
    """Return the int32 words of halves: the inverse of ``halves_of``."""
    low, high = (pairs[:, half : half + 1].astype(jnp.int32) for half in range(2))
    return low & 0xFFFF | jax.lax.shift_left(high, 16)
