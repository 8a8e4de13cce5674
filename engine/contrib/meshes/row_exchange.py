"""The programs that move rows between the processes of a job: to their owners, and back to who looks them up.

Every device sends every other one a block of lines of an agreed size (``all_to_all``). The lines of a process that go
to one device are split evenly over the process's devices, which send them. On the receiving device the lines of each
process are distinct; those of several processes may be the same, and their gradients are added in the order of ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penstock.rows.bridge import line_arrays
from penstock.rows.bridge.devices import AXIS
from penstock.rows.bridge.line_arrays import Arrays, bits_of, floats_of
from penstock.rows.bridge.programs import Program, compiled, left_in_hbm, row_sharding, rows_of, sharded
from penstock.rows.bridge.row_format import UNTOUCHED, Line

ByRank = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def exchange(mesh: Mesh, line: Line, by_rank: ByRank, beyond: int, multiple: int, grain: int, k: int) -> Program:
    """Return a compiled program: blocks of lines → the lines of each device, as ``programs.apply`` takes them:

    (lines i32[n,n,k], words i32[n,n,k,·], [frames i32[n,n,k,·/grain]], [keys u32[n,n,k,group]], zero i32[])
    → (lines i32[n,K], words i32[n,K,·], counts i32[n], [keys u32[n,K,group]])
    Axis 0 is the sending device, axis 1 the receiving one. K is n*k, rounded up to a multiple.
    by_rank : the devices of each process; beyond : the first pad
    grain : elements that share a number of frames, by which sums are divided; 0: no division, and no ``frames``
    keys : with bfloat16 weights; zero : as for ``programs.apply``
    """

    def local(lines: jax.Array, words: jax.Array, *others: jax.Array) -> Any:
        *planes, zero = others
        frames = [_received(planes[0], by_rank)] if grain else []
        keys = [_received(of_rows, by_rank) for of_rows in planes[len(frames) :]]
        all_lines = _received(lines, by_rank)
        merged, place, count = _merged(all_lines, beyond, multiple)
        size = len(merged)
        summed = _folded(_received(words, by_rank), place, size)
        if frames:
            summed = _divided(summed, _added(frames[0], place, size), grain, zero)
        if not line.masked:
            summed = jnp.where(summed == UNTOUCHED, 0, summed)  # of pads, which are not to look like NaNs
        return merged[None], summed[None], count[None], *(_largest(of_rows, place, size)[None] for of_rows in keys)

    num_keys = int(line.halves > 1)
    width = line.halves * line.width
    blocks: list[tuple[tuple[int, ...], Any]] = [((), np.int32), ((width,), np.int32)]
    blocks += [((width // grain,), np.int32)] if grain else []
    blocks += [((line.group,), np.uint32)] * num_keys
    program = sharded(mesh, local, num_row_args=len(blocks), num_scalars=1, donate=False)
    arguments = [_split(mesh, mesh.size, mesh.size, k, *shape, dtype=dtype) for shape, dtype in blocks]
    return compiled(mesh, program, *arguments, jax.ShapeDtypeStruct((), np.int32))


def _received(blocks: jax.Array, by_rank: ByRank) -> jax.Array:
    """Return what this device receives, process by process: [1, n, k, …] → [processes, devices of each * k, …]"""
    arrived: jax.Array = jax.lax.all_to_all(blocks[0], AXIS, 0, 0, tiled=True)
    order = np.asarray(by_rank)
    if (order.reshape(-1) != np.arange(order.size)).any():
        arrived = arrived[order.reshape(-1)]
    return arrived.reshape(len(by_rank), -1, *arrived.shape[2:])


def _merged(lines: jax.Array, beyond: int, multiple: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the distinct lines, ascending, and then pads; the index of each line in them; and how many are no pads.

    lines : i32[processes, K]
    """
    flat = lines.reshape(-1)
    order = jnp.argsort(flat)
    ascending = flat[order]
    is_new = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    number = jnp.cumsum(is_new, dtype=jnp.int32) - 1
    place = jnp.zeros_like(flat).at[order].set(number, unique_indices=True)
    size = -(-len(flat) // multiple) * multiple
    pads = beyond + len(flat) + jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(is_new & (ascending < beyond), dtype=jnp.int32)
    return pads.at[number].set(ascending), place.reshape(lines.shape), count


def _folded(words: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Return the sums of lines, i32[size, ·]. words : i32[processes, K, ·]; place : as ``_merged`` returns it

    The first gradient of an element is copied, and those of further processes are added in the order of ranks.
    """

    def add(rank: jax.Array, sums: jax.Array) -> jax.Array:
        before, new = sums.at[place[rank]].get(unique_indices=True), words[rank]
        added = bits_of(floats_of(before) + floats_of(new))
        either = jnp.where(new == UNTOUCHED, before, new)
        after = jnp.where((before == UNTOUCHED) | (new == UNTOUCHED), either, added)
        return sums.at[place[rank]].set(after, unique_indices=True)

    nothing = jnp.full((size, words.shape[2]), UNTOUCHED, jnp.int32)
    sums: jax.Array = jax.lax.fori_loop(0, len(words), add, nothing)
    return sums


def _added(frames: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Return the numbers of frames, i32[size, ·]: whole numbers, whose sum no order changes."""
    zeros = jnp.zeros((size, frames.shape[2]), jnp.int32)
    return zeros.at[place.reshape(-1)].add(frames.reshape(-1, frames.shape[2]))


def _divided(words: jax.Array, frames: jax.Array, grain: int, zero: jax.Array) -> jax.Array:
    """Return sums divided by the numbers of frames, each of which is that of ``grain`` elements."""
    # XLA multiplies by the inverse of what it sees to be repeated, which has other bits. So every element is or-ed with
    # a separate zero.
    by = bits_of(jnp.repeat(frames.astype(jnp.float32), grain, axis=1)) | words & zero
    return jnp.where(words == UNTOUCHED, words, bits_of(floats_of(words) / floats_of(by)))


def _largest(keys: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """Return the keys of rows, u32[size, group]: a row's is 0 or the same in every process."""
    zeros = jnp.zeros((size, keys.shape[2]), keys.dtype)
    return zeros.at[place.reshape(-1)].max(keys.reshape(-1, keys.shape[2]))


@lru_cache(maxsize=64)
def mark_lines(mesh: Mesh, line: Line, num_rows: int, size: int) -> Program:
    """Return a compiled program: (touched bool[n*R], lines i32[n,K], words i32[n,K,·]) → touched, rows set.

    It is ``programs.mark`` for exchanged lines.
    """

    def local(touched: jax.Array, lines: jax.Array, words: jax.Array) -> jax.Array:
        first = words[0].reshape(-1, line.halves, line.width)[:, :, : line.packed * line.dim : line.dim]
        rows = line_arrays.rows_of(line, lines[0])
        beyond = len(touched) + jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape)
        rows = jnp.where(first.reshape(rows.shape) == UNTOUCHED, beyond, rows)
        return touched.at[rows.reshape(-1)].set(True, mode="drop")

    program = sharded(mesh, local, num_row_args=3, num_scalars=0, donate=True)
    words = _split(mesh, mesh.size, size, line.halves * line.width)
    return compiled(mesh, program, _split(mesh, num_rows, dtype=np.bool_), _split(mesh, mesh.size, size), words)


@lru_cache(maxsize=256)
def fetch(mesh: Mesh, line: Line, num_lines: int, k: int) -> Program:
    """Return a compiled program: (table, rows i32[n,n,k], part i32[]) → f32[n,n,k,dim]: rows of other devices.

    Axis 0 is the device that looks the rows up, axis 1 the one that has them. A slot of one number per row repeats it.
    line : of the table; the arrays have ``num_lines`` lines of its stack
    """

    def local(table: Arrays, rows: jax.Array, part: jax.Array) -> jax.Array:
        wanted = jax.lax.all_to_all(rows[0], AXIS, 0, 0, tiled=True)
        parts = rows_of(line, table, wanted.reshape(-1))
        wide = jnp.stack([jnp.broadcast_to(values, (values.shape[0], line.dim)) for values in parts], axis=1)
        taken = jax.lax.dynamic_index_in_dim(wide, part, 1, keepdims=False)
        answers: jax.Array = jax.lax.all_to_all(taken.reshape(*wanted.shape, line.dim), AXIS, 0, 0, tiled=True)
        return answers[None]

    program = sharded(mesh, local, num_row_args=2, num_scalars=1, donate=False)
    table = tuple(_split(mesh, *shape, dtype=dtype) for shape, dtype in line.arrays(num_lines))
    rows = _split(mesh, mesh.size, mesh.size, k)
    return compiled(mesh, program, table, rows, jax.ShapeDtypeStruct((), np.int32), options=left_in_hbm(mesh, table))


def _split(mesh: Mesh, *shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(mesh))
