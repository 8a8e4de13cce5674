"""Compact rows, as ``packing`` sends them, spread on the device into the lines that they are rows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.bridge.row_format import UNTOUCHED, Arrays, Line


def spreading(line: Line, local: Callable[..., Any], num_keys: int = 0) -> Callable[..., Any]:
    """Return a program of one device that spreads compact rows into the words of lines, then runs ``local``.

    Of the arguments, words are i32[1,K*dim/128,128], the rows one after the other; the marks, u8[1,K], follow the
    counts; and keys are u32[1,K].
    """

    def program(table: Arrays, lines: Any, words: Any, counts: Any, marks: Any, *others: Any) -> Any:
        keys, scalars = others[:num_keys], others[num_keys:]
        planes = spread(line, words.reshape(-1, line.dim), marks[0], counts[0], *(of_rows[0] for of_rows in keys))
        its_words, *its_keys = (plane[None] for plane in planes)
        return local(table, lines, its_words, counts, *its_keys, *scalars)

    return program


def spread(line: Line, rows: jax.Array, marks: jax.Array, count: jax.Array, *keys: jax.Array) -> list[jax.Array]:
    """Return compact rows as words (n, halves * width), and their keys, if given, as (n, group).

    rows : int32 (n, dim), those of a line together; marks : uint8 (n,), as in partition.pyx
    count : int32, the number of lines; keys : uint32 (n,)
    UNTOUCHED becomes 0, so that the words of a line are those of its rows or-ed together: first of two neighbours,
    then of four, and so on.
    """
    size, place, begins = len(rows), marks & 0x7F, marks >= 0x80
    side_by_side = jnp.tile(rows ^ UNTOUCHED, (1, line.packed))
    of_lane = np.arange(line.packed * line.dim) // line.dim
    pads = ((0, 0), (0, line.width - len(of_lane)))
    halves = [place[:, None] == half * line.packed + of_lane for half in range(line.halves)]
    parts = [jnp.pad(jnp.where(here, side_by_side, 0), pads) for here in halves]
    for of_rows in keys:
        here = place[:, None] == np.arange(line.group)
        parts.append(jnp.where(here, jax.lax.bitcast_convert_type(of_rows, jnp.int32)[:, None], 0))
    wide, ends = jnp.concatenate(parts, axis=1), np.cumsum([part.shape[1] for part in parts])[:-1]
    if line.group > 1:
        distance, same = 1, _shifted(~begins, 1)  # whether the row at a distance is one of the same line
        while distance < line.group:
            wide = jnp.where(same[:, None], wide | _shifted(wide, distance), wide)
            same, distance = same & _shifted(same, distance), 2 * distance
        first = jnp.sort(jnp.where(begins, jnp.arange(size), size))
        wide = wide.at[first].get(mode="clip")
    wide = jnp.where(jnp.arange(size)[:, None] < count, wide, 0)
    planes = jnp.split(wide, ends, axis=1)
    words = jnp.concatenate(planes[: line.halves], axis=1) ^ UNTOUCHED
    return [words, *(jax.lax.bitcast_convert_type(plane, jnp.uint32) for plane in planes[line.halves :])]


def _shifted(rows: jax.Array, distance: int) -> jax.Array:
    """Return the rows that many places later; beyond the end zeros."""
    distance = min(distance, len(rows))
    return jnp.concatenate([rows[distance:], jnp.zeros_like(rows[:distance])])
