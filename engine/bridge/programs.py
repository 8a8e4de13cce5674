"""The compiled programs, one set per (mesh, update rule); XLA compiles each once per shape.

The table argument is donated and updated in place. Learning rates are runtime scalars: changing
one compiles nothing. No collective in any of them: every device works on its own rows.

Row numbers are unique and pads lie out of range, so gathers fill and scatters drop them.
``indices_are_sorted`` is never claimed: on TPU, XLA would then stream the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.errors import ConfigError
from penstock.updates import Ops, UpdateRule, update

AXIS = "shard"

# Rows that a sweep updates at once: its temporaries hold that many, never a table.
SWEPT_ROWS = 8192
Program = Callable[..., Any]


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0 over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


@lru_cache(maxsize=256)
def create(mesh: Mesh, shape: tuple[int, int, int], starts: tuple[float, ...]) -> Program:
    """() → a table on the devices: part p (weights, then slots) filled with starts[p].

    Made there, never copied from the host: an array that aliases host memory cannot be donated.
    """

    def program() -> jax.Array:
        parts = jnp.asarray(starts, jnp.float32)[None, :, None]
        return jnp.broadcast_to(parts, shape)

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
def apply(mesh: Mesh, rule: UpdateRule) -> Program:
    """(table, rows i32[n,K], grads f32[n,K,dim], lr f32[], zero i32[]) → (table updated in place, fence i32[n]).

    zero is 0, which the compiler must not know: see ``_rounded``.
    """

    def local(
        table: jax.Array, rows: jax.Array, grads: jax.Array, lr: jax.Array, zero: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Pads read ones, not zeros: their update is dropped, and a division by a zero accumulator
        # would still trip jax_debug_nans.
        state = table.at[rows[0]].get(mode="fill", fill_value=1.0, unique_indices=True)
        new = _updated(Ops(jnp, partial(_rounded, zero)), rule, lr, grads[0], state)
        return table.at[rows[0]].set(new, mode="drop", unique_indices=True), jnp.zeros(1, jnp.int32)

    return _sharded(mesh, local, num_row_args=3, num_scalars=2, num_out=2, donate=True)


@lru_cache(maxsize=256)
def no_rows(mesh: Mesh, num_rows: int) -> Program:
    """() → bool[num_rows], all False: which rows of all devices a step has touched, for ``mark``."""
    return jax.jit(lambda: jnp.zeros(num_rows, bool), out_shardings=row_sharding(mesh))


@lru_cache(maxsize=16)
def mark(mesh: Mesh) -> Program:
    """(touched bool[n*R], rows i32[n,K]) → touched, with those rows set."""

    def local(touched: jax.Array, rows: jax.Array) -> jax.Array:
        return touched.at[rows[0]].set(True, mode="drop", unique_indices=True)

    return _sharded(mesh, local, num_row_args=2, num_scalars=0, num_out=1, donate=True)


@lru_cache(maxsize=256)
def sweep(mesh: Mesh, rule: UpdateRule) -> Program:
    """(table, touched bool[n*R], lr f32[], zero i32[]) → (table, fence): a gradient of 0 for every row not touched.

    In place: block after block, because an update reads all parts of a row for each, which XLA would only do
    from a copy of the table.
    """

    def local(table: jax.Array, touched: jax.Array, lr: jax.Array, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
        ops = Ops(jnp, partial(_rounded, zero))
        num_rows, parts, dim = table.shape
        size = min(SWEPT_ROWS, num_rows)

        def block(number: jax.Array, table: jax.Array) -> jax.Array:
            # The last block begins early where the rows are no multiple: what was swept is left alone.
            first = jnp.minimum(number * size, num_rows - size)
            state = jax.lax.dynamic_slice(table, (first, 0, 0), (size, parts, dim))
            # A zero that the compiler sees would be left out of sums, and -0 + 0 would stay -0.
            grads = ops.rounded(jnp.zeros((size, dim), table.dtype))
            new = _updated(ops, rule, lr, grads, state)
            done = jax.lax.dynamic_slice(touched, (first,), (size,)) | (first + jnp.arange(size) < number * size)
            return jax.lax.dynamic_update_slice(table, jnp.where(done[:, None, None], state, new), (first, 0, 0))

        return jax.lax.fori_loop(0, -(-num_rows // size), block, table), jnp.zeros(1, jnp.int32)

    return _sharded(mesh, local, num_row_args=2, num_scalars=2, num_out=2, donate=True)


@lru_cache(maxsize=16)
def write(mesh: Mesh) -> Program:
    """(table, rows i32[n,K], values f32[n,K,dim], part i32[]) → (table with the values set, fence)."""

    def local(table: jax.Array, rows: jax.Array, values: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = table.at[rows[0], part].set(values[0], mode="drop", unique_indices=True)
        return table, jnp.zeros(1, jnp.int32)

    return _sharded(mesh, local, num_row_args=3, num_scalars=1, num_out=2, donate=True)


@lru_cache(maxsize=16)
def read(mesh: Mesh) -> Program:
    """(table, rows i32[n,K], part i32[]) → f32[n,K,dim]: a copy, so that no view keeps the table from donation."""

    def local(table: jax.Array, rows: jax.Array, part: jax.Array) -> jax.Array:
        return table.at[rows[0], part].get(mode="fill", fill_value=0.0, unique_indices=True)[None]

    return _sharded(mesh, local, num_row_args=2, num_scalars=1, num_out=1, donate=False)


@lru_cache(maxsize=16)
def copy_rows(mesh: Mesh) -> Program:
    """(table, rows i32[n,K]) → f32[n,K,parts,dim]: all parts of some rows, a copy as ``read`` gives one."""

    def local(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[rows[0]].get(mode="fill", fill_value=0.0, unique_indices=True)[None]

    return _sharded(mesh, local, num_row_args=2, num_scalars=0, num_out=1, donate=False)


def _updated(ops: Ops, rule: UpdateRule, lr: jax.Array, grads: jax.Array, state: jax.Array) -> jax.Array:
    """state f32[K, parts, dim] after one update with grads f32[K, dim]."""
    slots = tuple(state[:, 1 + s] for s in range(rule.num_slots))
    weights, slots = update(ops, rule, lr, grads, state[:, 0], slots)
    return jnp.stack([weights, *slots], axis=1)


def _rounded(zero: jax.Array, x: jax.Array) -> jax.Array:
    """x, as a float32 of its own: its bits, or a runtime 0. (Not xor, which undoes itself when done twice.)

    XLA on a CPU fuses a product into the sum it goes into (FMA), and rewrites a/sqrt(b) to a*rsqrt(b);
    optimization_barrier and reduce_precision do not stop the first. Through this the result equals
    NumPy's bit for bit, subnormal numbers aside, which XLA flushes to zero.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) | zero
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sharded(
    mesh: Mesh, local: Callable[..., Any], *, num_row_args: int, num_scalars: int, num_out: int, donate: bool
) -> Program:
    rows, scalar = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (rows,) * num_row_args + (scalar,) * num_scalars
    out_specs = rows if num_out == 1 else (rows,) * num_out
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
        donate_argnums=(0,) if donate else (),
    )
