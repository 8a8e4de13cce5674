"""The device programs as XLA makes them: one set per (mesh, update rule, form of a line).

The table arguments are donated and updated in place. Learning rates are runtime scalars: changing
one compiles nothing. No collective in any of them: every device works on its own lines.

Numbers of lines are unique and pads lie out of range, so gathers fill and scatters drop them.
``indices_are_sorted`` is never claimed: on TPU, XLA would then stream the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.bridge.row_format import Arrays, Line, Planes
from penstock.bridge.stochastic_rounding import stochastic
from penstock.errors import ConfigError
from penstock.updates import Ops, UpdateRule, update

AXIS = "shard"

# Rows that a sweep updates at once: its temporaries hold that many, never a table.
SWEPT_ROWS = 8192
# Rules that look at a whole row, or may: elements of neighbours in a line must not meet in them.
BY_ROW = {"row_wise_adagrad", "user_defined_program"}
Program = Callable[..., Any]


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0 over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


@lru_cache(maxsize=256)
def create(mesh: Mesh, line: Line, num_lines: int, starts: tuple[float, ...]) -> Program:
    """() → the arrays of a table with so many lines: weights of 0, slot s filled with starts[s].

    Made there, never copied from the host: an array that aliases host memory cannot be donated.
    """

    def program() -> Arrays:
        planes = [jnp.full((1, line.width), start, jnp.float32) for start in (0.0, *starts)]
        one = line.stacked(line.pack([planes] * line.halves))
        return tuple(jnp.broadcast_to(part, (num_lines, *part.shape[1:])) for part in one)

    return jax.jit(program, out_shardings=row_sharding(mesh))


def check_program(table: str, rule: UpdateRule, dim: int) -> None:
    """ConfigError where the program of a user_defined_program cannot be traced or gives other shapes than it must."""
    if rule.program is None:
        return
    rows = jax.ShapeDtypeStruct((8, dim), jnp.float32)
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.eval_shape(partial(update, Ops(jnp), rule), rate, rows, rows, (rows,) * rule.num_slots)
    except Exception as error:  # whatever a user's function may raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"table '{table}': its program fails: {type(error).__name__}: {reason}") from error


@lru_cache(maxsize=256)
def apply(mesh: Mesh, rule: UpdateRule, line: Line) -> Program:
    """(table, lines i32[n,K], words i32[n,K,·], counts i32[n], lr f32[], zero i32[], key u32[]) → (table, fence).

    zero is 0, which the compiler must not know: see ``_rounded``. key : of stochastic rounding (rounding.py).
    """

    def local(table: Arrays, lines: Any, words: Any, counts: Any, lr: Any, zero: Any, key: Any) -> Any:
        ops = Ops(jnp, partial(_rounded, zero))
        planes = line.gather(table, lines[0])
        new = updated(ops, rule, line, lr, key, lines[0], line.received(words[0]), planes)
        return line.scatter(table, lines[0], new), _fence()

    return sharded(mesh, local, num_row_args=4, num_scalars=3, num_out=2, donate=True)


@lru_cache(maxsize=256)
def no_rows(mesh: Mesh, num_rows: int) -> Program:
    """() → bool[num_rows], all False: which rows of all devices a step has touched, for ``mark``."""
    return jax.jit(lambda: jnp.zeros(num_rows, bool), out_shardings=row_sharding(mesh))


@lru_cache(maxsize=16)
def mark(mesh: Mesh) -> Program:
    """(touched bool[n*R], rows i32[n,K]) → touched, with those rows set."""

    def local(touched: jax.Array, rows: jax.Array) -> jax.Array:
        return touched.at[rows[0]].set(True, mode="drop", unique_indices=True)

    return sharded(mesh, local, num_row_args=2, num_scalars=0, num_out=1, donate=True)


@lru_cache(maxsize=256)
def sweep(mesh: Mesh, rule: UpdateRule, line: Line) -> Program:
    """(table, touched bool[n*R], lr f32[], zero i32[], key u32[]) → (table, fence): a gradient of 0 for all other rows.

    In place: block after block, because an update reads all planes of a line for each, which XLA would only do
    from a copy of the table.
    """

    def local(table: Arrays, touched: jax.Array, lr: jax.Array, zero: jax.Array, key: jax.Array) -> Any:
        ops = Ops(jnp, partial(_rounded, zero))
        num_lines = table[0].shape[0]
        size = min(max(1, SWEPT_ROWS // line.group), num_lines)

        def block(number: jax.Array, table: Arrays) -> Arrays:
            # The last block begins early where the lines are no multiple: what was swept is left alone.
            first = jnp.minimum(number * size, num_lines - size)
            lines = first + jnp.arange(size)
            done = jax.lax.dynamic_slice(touched, (first * line.group,), (size * line.group,))
            done = done.reshape(size, line.group) | (lines < number * size)[:, None]
            parts = [jax.lax.dynamic_slice_in_dim(array, first, size) for array in table]
            planes = line.planes(parts)
            # A zero that the compiler sees would be left out of sums, and -0 + 0 would stay -0.
            grads = ops.rounded(jnp.zeros((size, line.width), jnp.float32))
            waiting = [spread(line, ~rows) for rows in jnp.split(done, line.halves, axis=1)]
            new = updated(ops, rule, line, lr, key, lines, [(grads, rows) for rows in waiting], planes)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(array, part, first, 0)
                for array, part in zip(table, line.stacked(new), strict=True)
            )

        return jax.lax.fori_loop(0, -(-num_lines // size), block, table), _fence()

    return sharded(mesh, local, num_row_args=2, num_scalars=3, num_out=2, donate=True)


def spread(line: Line, rows: jax.Array) -> jax.Array:
    """bool (n, packed), one for each row of a plane → (n, width), one for each element; False for those of no row."""
    elements = jnp.repeat(rows, line.dim, axis=1)
    return jnp.pad(elements, ((0, 0), (0, line.width - elements.shape[1])))


@lru_cache(maxsize=64)
def write(mesh: Mesh, line: Line) -> Program:
    """(table, lines i32[n,K], words i32[n,K,·], part i32[]) → (table with the values set, fence)."""

    def local(table: Arrays, lines: jax.Array, words: jax.Array, part: jax.Array) -> Any:
        halves = line.unpack(line.gather(table, lines[0]))
        new = []
        for (values, touched), planes in zip(line.received(words[0]), halves, strict=True):
            here = [part == number if touched is None else touched & (part == number) for number in range(len(planes))]
            new.append([jnp.where(set_, values, plane) for set_, plane in zip(here, planes, strict=True)])
        return line.scatter(table, lines[0], line.pack(new)), _fence()

    return sharded(mesh, local, num_row_args=3, num_scalars=1, num_out=2, donate=True)


@lru_cache(maxsize=64)
def read(mesh: Mesh, line: Line) -> Program:
    """(table, rows i32[n,K], part i32[]) → f32[n,K,dim]: a copy, so that no view keeps the table from donation."""

    def local(table: Arrays, rows: jax.Array, part: jax.Array) -> jax.Array:
        taken: jax.Array = jax.lax.dynamic_index_in_dim(_rows(line, table, rows[0]), part, 1, keepdims=False)
        return taken[None]

    return sharded(mesh, local, num_row_args=2, num_scalars=1, num_out=1, donate=False)


@lru_cache(maxsize=64)
def copy_rows(mesh: Mesh, line: Line) -> Program:
    """(table, rows i32[n,K]) → f32[n,K,parts,dim]: all parts of some rows, a copy as ``read`` gives one."""

    def local(table: Arrays, rows: jax.Array) -> jax.Array:
        return _rows(line, table, rows[0])[None]

    return sharded(mesh, local, num_row_args=2, num_scalars=0, num_out=1, donate=False)


def _rows(line: Line, table: Arrays, rows: jax.Array) -> jax.Array:
    """f32[K, parts, dim]: all parts of some rows of a device. Rows are unique, their lines need not be."""
    lines, inside = rows // line.group, rows % line.group
    taken = [array.at[lines].get(mode="fill", fill_value=0, unique_indices=line.group == 1) for array in table]
    low, *high = (line.pick(parts, inside % line.packed) for parts in line.unpack(line.planes(taken)))
    if not high:
        return jnp.stack(low, axis=1)
    upper = (inside >= line.packed)[:, None]
    return jnp.stack([jnp.where(upper, b, a) for a, b in zip(low, high[0], strict=True)], axis=1)


def updated(
    ops: Ops,
    rule: UpdateRule,
    line: Line,
    lr: jax.Array,
    key: jax.Array,
    lines: jax.Array,
    received: Sequence[tuple[jax.Array, jax.Array | None]],
    planes: Planes,
) -> Planes:
    """The planes of some lines after one update with what they received."""
    new = []
    for half, ((grads, touched), before) in enumerate(zip(received, line.unpack(planes), strict=True)):
        after = _updated_rows(ops, rule, line, lr, grads, before)
        if line.places is not None:
            after[0] = _to_16_bits(line, key, lines, half, after[0])
        if touched is not None:
            after = [jnp.where(touched, a, b) for a, b in zip(after, before, strict=True)]
        new.append(after)
    return line.pack(new)


def _updated_rows(ops: Ops, rule: UpdateRule, line: Line, lr: jax.Array, grads: jax.Array, before: Planes) -> Planes:
    by_row = line.masked and rule.algorithm in BY_ROW
    grads, *before = map(line.rows, (grads, *before)) if by_row else (grads, *before)
    weights, slots = update(ops, rule, lr, grads, before[0], tuple(before[1:]))
    return [line.plane(rows) if by_row else rows for rows in (weights, *slots)]


def _to_16_bits(line: Line, key: jax.Array, lines: jax.Array, half: int, weights: jax.Array) -> jax.Array:
    assert line.places is not None
    rows, elements = line.elements(lines, half)
    ids = line.places.ids(jax.lax.axis_index(AXIS), rows)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint32)
    rounded = stochastic(jnp, bits, key, ids, elements.astype(jnp.uint32))
    return jax.lax.bitcast_convert_type(rounded, jnp.float32)


def _fence() -> jax.Array:
    return jnp.zeros(1, jnp.int32)


def _rounded(zero: jax.Array, x: jax.Array) -> jax.Array:
    """x, as a float32 of its own: its bits, or a runtime 0. (Not xor, which undoes itself when done twice.)

    XLA on a CPU fuses a product into the sum it goes into (FMA), and rewrites a/sqrt(b) to a*rsqrt(b);
    optimization_barrier and reduce_precision do not stop the first. Through this the result equals
    NumPy's bit for bit, subnormal numbers aside, which XLA flushes to zero.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) | zero
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def sharded(
    mesh: Mesh, local: Callable[..., Any], *, num_row_args: int, num_scalars: int, num_out: int, donate: bool
) -> Program:
    """``local``, which sees one device's part of each argument, over the mesh, jitted."""
    rows, scalar = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (rows,) * num_row_args + (scalar,) * num_scalars
    out_specs = rows if num_out == 1 else (rows,) * num_out
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
        donate_argnums=(0,) if donate else (),
    )
