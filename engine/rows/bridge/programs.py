"""The device programs that XLA compiles: one set per (mesh, update rule, line format).

The table arguments are donated and updated in place. Learning rates are runtime scalars: changing
one compiles nothing. The programs have no collectives: every device processes only its own lines.

Line numbers are unique and pads lie out of range, so gathers fill and scatters drop them.
``indices_are_sorted`` is never set, because on TPU XLA would then stream the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.base.errors import ConfigError
from penstock.model.updates import Ops, UpdateRule, update
from penstock.model.updates.optax_transforms import own_promotions
from penstock.rows.bridge import line_arrays
from penstock.rows.bridge.devices import AXIS
from penstock.rows.bridge.line_arrays import Arrays, Planes
from penstock.rows.bridge.row_format import BY_ROW, UNTOUCHED, Line
from penstock.rows.bridge.stochastic_rounding import stochastic

# The part of a write that sets the weights to values and the slots to their starts.
NEW_ROWS = -1
# Rows that a sweep updates at once: its temporaries are of this size, never of a table's.
SWEPT_ROWS = 8192
# The VMEM of a TPU's core, at most.
VMEM_BYTES = 128 << 20
Program = Callable[..., Any]


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return a sharding of axis 0 over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


@lru_cache(maxsize=256)
def create(mesh: Mesh, line: Line, num_lines: int, starts: tuple[float, ...]) -> Program:
    """Return a program: () → the arrays of a table of ``num_lines`` lines, weights 0 and slot s filled with starts[s].

    It creates them on the devices, not from host arrays: an array that aliases host memory cannot be donated.
    """

    def program() -> Arrays:
        dims = [line.width] * (1 + line.plane_slots) + [line.packed] * line.row_slots
        planes = [jnp.full((1, dim), start, jnp.float32) for dim, start in zip(dims, (0.0, *starts), strict=True)]
        single_line = line_arrays.stacked(line, line_arrays.pack(line, [planes] * line.halves))
        # On a TPU, a slot of one number per row is (1, group) in one line, and one axis in the table.
        wide = [jnp.broadcast_to(part, (num_lines, *part.shape[1:])) for part in single_line]
        return tuple(part.reshape(shape) for part, (shape, _) in zip(wide, line.arrays(num_lines), strict=True))

    return jax.jit(program, out_shardings=row_sharding(mesh))


def check_program(table: str, rule: UpdateRule, dim: int) -> None:
    """Raise ConfigError if the program of a user_defined_program cannot be traced or returns wrong shapes."""
    if rule.program is None:
        return
    rows = jax.ShapeDtypeStruct((8, dim), jnp.float32)
    rate = jax.ShapeDtypeStruct((), jnp.float32)  # a program reads none
    try:
        with own_promotions():
            jax.eval_shape(partial(update, Ops(jnp), rule), rate, rows, rows, (rows,) * rule.num_slots)
    except Exception as error:  # a user's function may raise any type
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"table '{table}': its program fails: {type(error).__name__}: {reason}") from error


@lru_cache(maxsize=256)
def apply(mesh: Mesh, rule: UpdateRule, line: Line, compact: bool = False) -> Program:
    """Return the program of a step:

    (table, lines i32[n,K], words i32[n,K,·], counts i32[n], lr f32[], zero i32[], key u32[]) → (table, fence)
    lr : of a rule that ``is_corrected``, f32[3]
    zero : 0, but unknown to the compiler, see ``_rounded``; key : of stochastic rounding (stochastic_rounding.py)
    With bfloat16 weights, the keys of the rows of the lines, u32[n,K,group], follow the counts.
    compact : the rows are not spread into lines; see ``spreading``
    """

    num_keys, local = int(line.halves > 1), local_apply(rule, line)
    step = spreading(line, local, num_keys) if compact else local
    return sharded(mesh, step, num_row_args=4 + compact + num_keys, num_scalars=3, donate=True)


def local_apply(rule: UpdateRule, line: Line) -> Callable[..., Any]:
    """Return the function of ``apply`` for one device's part of its arguments."""

    def local(table: Arrays, lines: Any, words: Any, counts: Any, *others: Any) -> Any:
        *keys, lr, zero, key = others
        ops = Ops(jnp, partial(_rounded, zero))
        planes = line_arrays.gather(line, table, lines[0])
        rounding = [(key, of_rows[0]) for of_rows in keys]
        new = updated(ops, rule, line, lr, line_arrays.received(line, words[0]), planes, *rounding)
        return line_arrays.scatter(line, table, lines[0], new), _fence()

    return local


@lru_cache(maxsize=256)
def no_rows(mesh: Mesh, num_rows: int) -> Program:
    """Return a program: () → bool[num_rows], all False: the rows of all devices that a step touches, for ``mark``."""
    return jax.jit(lambda: jnp.zeros(num_rows, bool), out_shardings=row_sharding(mesh))


@lru_cache(maxsize=16)
def mark(mesh: Mesh) -> Program:
    """Return a program: (touched bool[n*R], rows i32[n,K]) → touched, with those rows set."""

    def local(touched: jax.Array, rows: jax.Array) -> jax.Array:
        return touched.at[rows[0]].set(True, mode="drop", unique_indices=True)

    return sharded(mesh, local, num_row_args=2, num_scalars=0, donate=True)


@lru_cache(maxsize=256)
def sweep(mesh: Mesh, rule: UpdateRule, line: Line) -> Program:
    """Return the program that updates all rows but the touched ones with a gradient of 0:

    (table, touched bool[n*R], lr f32[], zero i32[], key u32[]) → (table, fence)
    It works in place, block by block, because an update reads all planes of a line for each of them, which XLA would
    otherwise do only from a copy of the table.
    """

    def local(table: Arrays, touched: jax.Array, lr: jax.Array, zero: jax.Array, key: jax.Array) -> Any:
        ops = Ops(jnp, partial(_rounded, zero))
        num_lines = table[0].shape[0]
        size = min(max(1, SWEPT_ROWS // line.group), num_lines)

        def block(number: jax.Array, table: Arrays) -> Arrays:
            # If size does not divide the lines, the last block starts early and skips lines already swept.
            first = jnp.minimum(number * size, num_lines - size)
            lines = first + jnp.arange(size)
            done = jax.lax.dynamic_slice(touched, (first * line.group,), (size * line.group,))
            done = done.reshape(size, line.group) | (lines < number * size)[:, None]
            parts = [jax.lax.dynamic_slice_in_dim(array, first, size) for array in table]
            planes = line_arrays.planes_of(line, parts)
            # The compiler would drop a known zero from sums, and -0 + 0 would stay -0.
            grads = ops.rounded(jnp.zeros((size, line.width), jnp.float32))
            waiting = [(grads, line_arrays.of_half(line, ~done, half)) for half in range(line.halves)]
            rounding = []
            if line.row_ids is not None:
                rows = lines[:, None] * line.group + jnp.arange(line.group)
                rounding = [(key, line.row_ids.ids(jnp, jax.lax.axis_index(AXIS), rows))]
            new = updated(ops, rule, line, lr, waiting, planes, *rounding)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(array, part, first, 0)
                for array, part in zip(table, line_arrays.stacked(line, new), strict=True)
            )

        return jax.lax.fori_loop(0, -(-num_lines // size), block, table), _fence()

    return sharded(mesh, local, num_row_args=2, num_scalars=3, donate=True)


@lru_cache(maxsize=64)
def write(mesh: Mesh, line: Line, compact: bool = False) -> Program:
    """Return a program:

    (table, lines i32[n,K], words i32[n,K,·], counts i32[n], chosen bool[parts], new bool[parts], starts f32[parts])
        → (table, fence)

    It sets each chosen part to the values, or where it is new to its start; ``written`` returns both. They are not
    numbers to compare, because in large writes XLA for GPUs launches a kernel for each comparison.
    compact : as for ``apply``
    """

    def local(table: Arrays, lines: Any, words: Any, counts: Any, chosen: Any, new: Any, starts: Any) -> Any:
        del counts  # a write drops pads by their numbers
        halves = line_arrays.unpack(line, line_arrays.gather(line, table, lines[0]))
        halves_after = []
        for (values, touched), planes in zip(line_arrays.received(line, words[0]), halves, strict=True):
            after = []
            for number, plane in enumerate(planes):
                plane_values, mask = values, touched
                if number:
                    plane_values, mask = (line_arrays.like_slot(line, number - 1, each) for each in (values, touched))
                value = jnp.where(new[number], starts[number], plane_values) if number else plane_values
                after.append(jnp.where(chosen[number] if mask is None else mask & chosen[number], value, plane))
            halves_after.append(after)
        return line_arrays.scatter(line, table, lines[0], line_arrays.pack(line, halves_after)), _fence()

    program = spreading(line, local) if compact else local
    return sharded(mesh, program, num_row_args=4 + compact, num_scalars=3, donate=True)


def written(part: int, num_parts: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which parts a write sets, and which of them to their starts: bool (parts,). part : one, or NEW_ROWS"""
    parts = np.arange(num_parts)
    is_new = part == NEW_ROWS
    return (parts == part) | is_new, (parts > 0) & is_new


@lru_cache(maxsize=64)
def read(mesh: Mesh, line: Line) -> Program:
    """Return a program: (table, rows i32[n,K]) → the parts of the rows, each f32[n,K,floats per row].

    They are copies: a view would prevent donation. The caller transfers the parts that it needs to the host.
    """

    def local(table: Arrays, rows: jax.Array) -> Planes:
        return [part[None] for part in rows_of(line, table, rows[0])]

    return sharded(mesh, local, num_row_args=2, num_scalars=0, donate=False)


def rows_of(line: Line, table: Arrays, rows: jax.Array) -> Planes:
    """Return every part of a device's rows, f32[K,dim] or f32[K,1]; they may repeat."""
    lines, inside = rows // line.group, rows % line.group
    planes = line_arrays.gather(line, table, lines)
    low, *high = (line_arrays.pick(line, parts, inside % line.packed) for parts in line_arrays.unpack(line, planes))
    if not high:
        return low
    upper = (inside >= line.packed)[:, None]
    return [jnp.where(upper, b, a) for a, b in zip(low, high[0], strict=True)]


def updated(
    ops: Ops,
    rule: UpdateRule,
    line: Line,
    lr: jax.Array,
    received: Sequence[tuple[jax.Array, jax.Array | None]],
    planes: Planes,
    rounding: tuple[jax.Array, jax.Array] | None = None,
) -> Planes:
    """Return the planes of lines after one update.

    received : per half of the rows, see ``line_arrays.received``
    rounding : with bfloat16 weights: the key of the step and those of the rows, uint32 (n, group)
    """
    new = []
    for half, ((grads, touched), before) in enumerate(zip(received, line_arrays.unpack(line, planes), strict=True)):
        after = _updated_rows(ops, rule, line, lr, grads, before)
        if rounding is not None:
            after[0] = _to_16_bits(line, rounding[0], line_arrays.of_half(line, rounding[1], half), after[0])
        if touched is not None:
            masks = [touched, *(line_arrays.like_slot(line, slot, touched) for slot in range(line.num_slots))]
            after = [jnp.where(t, a, b) for t, a, b in zip(masks, after, before, strict=True)]
        new.append(after)
    return line_arrays.pack(line, new)


def _updated_rows(ops: Ops, rule: UpdateRule, line: Line, lr: jax.Array, grads: jax.Array, before: Planes) -> Planes:
    by_row = line.masked and rule.algorithm in BY_ROW
    grads, *before = (line_arrays.rows_in(line, plane) for plane in (grads, *before)) if by_row else (grads, *before)
    weights, slots = update(ops, rule, lr, grads, before[0], tuple(before[1:]))
    return [line_arrays.plane_of(line, rows) if by_row else rows for rows in (weights, *slots)]


def _to_16_bits(line: Line, key: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    elements = jax.lax.broadcasted_iota(jnp.uint32, weights.shape, 1) % np.uint32(line.dim)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint32)
    rounded = stochastic(jnp, bits, key, ids, elements)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32)


def _fence() -> jax.Array:
    return jnp.zeros(1, jnp.int32)


def _rounded(zero: jax.Array, x: jax.Array) -> jax.Array:
    """Return x rounded to float32: its bits or-ed with a runtime 0. (Not xor, which cancels when applied twice.)

    XLA on a CPU fuses a product into the sum that uses it (FMA), and rewrites a/sqrt(b) to a*rsqrt(b);
    optimization_barrier and reduce_precision do not prevent the former. This function does, so results
    equal NumPy's bit for bit, except for subnormal numbers, which XLA flushes to zero.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) | zero
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def sharded(mesh: Mesh, local: Callable[..., Any], *, num_row_args: int, num_scalars: int, donate: bool) -> Program:
    """Return ``local``, which processes one device's part of each argument, mapped over the mesh and jitted."""
    rows, scalar = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (rows,) * num_row_args + (scalar,) * num_scalars
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=NamedSharding(mesh, rows),
        donate_argnums=(0,) if donate else (),
    )


def compiled(mesh: Mesh, program: Any, *shapes: Any, options: Mapping[str, Any] = MappingProxyType({})) -> Program:
    """Compile a jitted program ahead of its first call, so that calls do not depend on the context they are made in.

    options : of the compiler
    """
    with own_settings(mesh):
        run: Program = program.lower(*shapes).compile(compiler_options=dict(options))
    return run


@contextmanager
def own_settings(mesh: Mesh) -> Iterator[None]:
    """Compile and run penstock's programs on a mesh, whatever the caller has set for other programs."""
    with jax.set_mesh(mesh), jax.transfer_guard("allow"), jax.disable_jit(False), own_promotions():
        yield


def left_in_hbm(mesh: Mesh, table: Sequence[Any]) -> dict[str, Any]:
    """Return the compiler options by which XLA moves no array of a table to VMEM; none if that is impossible.

    XLA moves whole arrays that fit, for however few rows. The option also keeps the rows themselves off the chip.
    table : the arrays, or their shapes
    """
    least = min(math.prod(array.shape) * array.dtype.itemsize for array in table) // mesh.size
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return {"xla_msa_enable": False} if on_tpu and least <= VMEM_BYTES else {}


# ---- compact rows, as packing.py sends them, spread into the lines that they are rows of


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
