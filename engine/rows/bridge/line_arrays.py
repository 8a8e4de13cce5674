"""Lines in the arrays of devices, as traced functions: gathered, taken apart into planes and rows, and written back.

row_format.py describes the format; ``line`` is that of a table.

``_by_line`` fixes the memory layout of the lines that a step writes back. By default XLA keeps all first strips, then
all second ones, and converts them to lines at the end: on v5p in HBM, not on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout as in_memory

from penstock.rows.bridge.row_format import UNTOUCHED, Line

Planes = list[jax.Array]
Arrays = tuple[jax.Array, ...]

# Two bfloat16 weights of 1.0, and as a float32 about 1.
TWO_ONES = 0x3F803F80


def gather(line: Line, arrays: Arrays, lines: jax.Array) -> Planes:
    """Return the planes of lines, which may repeat; pads lie beyond the arrays.

    Where rows share lines pads read ones: a division by a zero accumulator would trip jax_debug_nans, though their
    update is dropped. Elsewhere they read the last line: on a GPU the ones would be a separate kernel.
    """
    mode = "clip" if line.lanes == 1 else "fill"
    fills = {jnp.dtype(jnp.float32): 1.0, jnp.dtype(jnp.int32): TWO_ONES, jnp.dtype(jnp.int16): TWO_ONES & 0x7FFF}
    places = [lines] * len(line.groups) + [rows_of(line, lines)] * (len(arrays) - len(line.groups))
    return planes_of(
        line, [a.at[place].get(mode=mode, fill_value=fills[a.dtype]) for a, place in zip(arrays, places, strict=True)]
    )


def scatter(line: Line, arrays: Arrays, lines: jax.Array, planes: Planes) -> Arrays:
    """Return the arrays with the planes of lines written back, in place if the arrays are donated."""
    places = [lines] * len(line.groups) + [rows_of(line, lines)] * (len(arrays) - len(line.groups))
    return tuple(
        array.at[place].set(new, mode="drop", unique_indices=True)
        for array, place, new in zip(arrays, places, stacked(line, planes), strict=True)
    )


def rows_of(line: Line, lines: jax.Array) -> jax.Array:
    """Return the numbers of the rows of lines: (n,) → (n, group)."""
    return lines[:, None] * line.group + jnp.arange(line.group, dtype=lines.dtype)


def planes_of(line: Line, parts: Sequence[jax.Array]) -> Planes:
    """Return lines gathered from each of the arrays as planes (n, width), and slots of one number per row."""
    lines, slots = parts[: len(line.groups)], parts[len(line.groups) :]
    if line.slots_follow:
        sizes = [line.width] * line.num_planes + [line.group] * line.row_slots
        parts = jnp.split(lines[0][:, 0], list(accumulate(sizes))[:-1], axis=1)
        planes, slots = parts[: line.num_planes], parts[line.num_planes :]
        return [*planes, *(slots if line.halves == 1 else map(floats_of, slots))]
    if line.forms[-1][1] == np.int16:  # an array of one strip, the last
        whole = joined_halves(lines[-1])
        lines = [*lines[:-1], whole if line.halves > 1 else floats_of(whole)]
    return [*join_strips(line, [part[:, number] for part in lines for number in range(part.shape[1])]), *slots]


def stacked(line: Line, planes: Planes) -> list[jax.Array]:
    """Return planes as lines of each of the arrays: the inverse of ``planes_of``."""
    by_line = _by_line if line.lanes > 1 else lambda part: part
    planes, slots = planes[: line.num_planes], planes[line.num_planes :]
    if line.slots_follow:
        return [jnp.concatenate([*planes, *(slots if line.halves == 1 else map(bits_of, slots))], axis=1)[:, None]]
    strips, ends = [by_line(strip) for strip in strips_of(line, planes)], accumulate(line.groups, initial=0)
    parts = [jnp.stack(strips[start:end], axis=1) for start, end in pairwise(ends)]
    lines = [
        by_line(halves_of(part) if dtype == np.int16 else part)
        for part, (_, dtype) in zip(parts, line.forms, strict=True)
    ]
    return [*lines, *slots]


def join_strips(line: Line, strips: Planes) -> Planes:
    """Return strips (n, strip) as planes."""
    each = line.width // line.strip
    if each == 1:
        return strips
    return [jnp.concatenate(strips[start : start + each], axis=1) for start in range(0, len(strips), each)]


def strips_of(line: Line, planes: Planes) -> Planes:
    """Return planes as strips."""
    starts = range(0, line.width, line.strip)
    return [plane[:, s : s + line.strip] for plane in planes for s in starts] if len(starts) > 1 else planes


def unpack(line: Line, planes: Planes) -> list[Planes]:
    """Return [weights, *slots] as float32, for each half of the rows: (n, width), slots per row (n, packed)."""
    if line.halves == 1:
        return [planes]
    word, rest, of_rows = planes[0], planes[1 : line.num_planes], planes[line.num_planes :]
    slots = [
        [
            *(floats_of(slot) for slot in rest[half::2]),
            *(slot[:, half * line.packed :][:, : line.packed] for slot in of_rows),
        ]
        for half in range(2)
    ]
    low, high = jax.lax.shift_left(word, 16), word & np.int32(-0x10000)
    return [[floats_of(weights), *slots[half]] for half, weights in enumerate((low, high))]


def pack(line: Line, rows: Sequence[Planes]) -> Planes:
    """Return planes from the result of ``unpack``; bfloat16 weights must already be rounded."""
    if line.halves == 1:
        return rows[0]
    (low, *low_slots), (high, *high_slots) = rows
    word = jax.lax.shift_right_logical(bits_of(low), 16) | bits_of(high)
    pairs = list(zip(low_slots, high_slots, strict=True))
    of_planes, of_rows = pairs[: line.plane_slots], pairs[line.plane_slots :]
    slots = [bits_of(plane) for pair in of_planes for plane in pair]
    return [word, *slots, *(jnp.concatenate(pair, axis=1) for pair in of_rows)]


def received(line: Line, words: jax.Array) -> list[tuple[jax.Array, jax.Array | None]]:
    """Return (gradients, touched), float32 and bool (n, width), for each half of the rows.

    words : int32 (n, halves * width). touched is None if all elements are.
    """
    if not line.masked:
        return [(floats_of(words), None)]
    halves = [words[:, half * line.width : (half + 1) * line.width] for half in range(line.halves)]
    touched = [half != UNTOUCHED for half in halves]
    return [(floats_of(jnp.where(t, half, 0)), t) for half, t in zip(halves, touched, strict=True)]


def rows_in(line: Line, plane: jax.Array) -> jax.Array:
    """Return the rows of a plane: (n, width) → (n * packed, dim); or the rows of a slot, (n * packed, 1)."""
    if plane.shape[1] < line.width:  # a slot of one number per row
        return plane.reshape(-1, 1)
    return plane[:, : line.packed * line.dim].reshape(-1, line.dim)


def like_slot(line: Line, slot: int, plane: Any) -> Any:
    """Return a plane (n, width) as a slot has it: with one number per row, the first of each row, (n, packed)."""
    return plane if plane is None or slot < line.plane_slots else plane[:, : line.packed * line.dim : line.dim]


def plane_of(line: Line, rows: jax.Array) -> jax.Array:
    """Return rows as a plane: the inverse of ``rows_in``, except that padding elements are 0."""
    if rows.shape[1] < line.dim:
        return rows.reshape(-1, line.packed)
    side_by_side = rows.reshape(-1, line.packed * line.dim)
    return jnp.pad(side_by_side, ((0, 0), (0, line.width - side_by_side.shape[1])))


def spread(line: Line, rows: jax.Array, inside: jax.Array) -> jax.Array:
    """Return each of rows (n, dim) in a separate line: (n, width), 0 elsewhere. inside : as for ``pick``"""
    repeated = jnp.tile(rows, (1, line.packed))
    places = np.arange(repeated.shape[1], dtype=np.int32) // line.dim
    return jnp.pad(jnp.where(inside[:, None] == places, repeated, 0), ((0, 0), (0, line.width - len(places))))


def of_half(line: Line, rows: jax.Array, half: int) -> jax.Array:
    """Expand a value per row of a line, (n, group), to the elements of a half's planes, (n, width); pads are 0."""
    elements = jnp.repeat(rows[:, half * line.packed : (half + 1) * line.packed], line.dim, axis=1)
    return jnp.pad(elements, ((0, 0), (0, line.width - elements.shape[1])))


def pick(line: Line, planes: Sequence[jax.Array], inside: jax.Array) -> list[jax.Array]:
    """Return one row of each plane's line, (n, dim) or (n, 1). inside : int32 (n,), which of the packed rows

    It selects among the rows of whole lines, because a TPU would gather single elements one by one. The words of
    the other rows become 0, so the sum has the bits of the selected one.
    """
    if line.packed == 1:
        return [plane[:, : line.dim] for plane in planes]
    selected = (inside[:, None] == jnp.arange(line.packed))[:, :, None]
    rows = [rows_in(line, plane) for plane in planes]
    words = [bits_of(part).reshape(-1, line.packed, part.shape[1]) for part in rows]
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
