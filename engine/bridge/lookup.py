"""Lookups and updates inside a user's jitted step: pure functions over plain arrays.

For users who keep tables as arrays, (vocabulary_size, dim) in id order, and want the whole step compiled: the host
creates deduplication data, and the functions here, except ``padded_uses``, are traced. ``lookup`` has a custom
gradient, so that ``jax.grad`` of a model gives the gradients of the unique rows, never an array of the table's size.
Nothing here is sharded: under ``shard_map`` each device sees its part of the arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from penstock.errors import UsageError
from penstock.updates import Ops, UpdateRule, quantize, update

Quantization = tuple[int, float, float]  # num_buckets, lower, upper


class Uses(NamedTuple):
    """One feature's part of deduplication data, padded to fixed sizes: a program is compiled once per size.

    unique : int32, shape (num_unique,), ids of the table; pads are distinct, beyond the table
    rows, samples : int32, shape (num_lookups,); pads are beyond the unique ids and the samples
    gains : float32, shape (num_lookups,)
    """

    unique: Any
    rows: Any
    samples: Any
    gains: Any


def padded_uses(
    unique_ids: Any, uses: Any, vocabulary_size: int, num_samples: int, num_unique: int, num_lookups: int
) -> Uses:
    """Return the Uses of a feature as NumPy arrays.

    unique_ids : ``dedup.unique_ids[table]``; uses : ``dedup.features[path]``
    num_unique, num_lookups : the sizes to pad to. Raises UsageError if the lookups exceed them, or ids exceed int32.
    """
    for what, number, room in (("unique ids", len(unique_ids), num_unique), ("lookups", len(uses.rows), num_lookups)):
        if number > room:
            raise UsageError(f"{number} {what} do not fit {room}; make room for more")
    if vocabulary_size + num_unique > np.iinfo(np.int32).max:
        raise UsageError(f"a table of {vocabulary_size} rows has ids beyond int32; send its gradients to an Engine")
    unique = vocabulary_size + np.arange(num_unique, dtype=np.int32)
    unique[: len(unique_ids)] = unique_ids
    rows, samples = (np.full(num_lookups, beyond, np.int32) for beyond in (num_unique, num_samples))
    gains = np.zeros(num_lookups, np.float32)
    number = len(uses.rows)
    rows[:number], samples[:number] = uses.rows, uses.samples
    gains[:number] = 1 if uses.gains is None else uses.gains
    return Uses(unique, rows, samples, gains)


def gather(table: jax.Array, uses: Uses) -> jax.Array:
    """Return the unique rows, (num_unique, dim), of a table (vocabulary_size, dim) or of a slot; pads are ones."""
    # Not zeros: their update is dropped, but a division by a zero accumulator would trip jax_debug_nans.
    return table.at[uses.unique].get(mode="fill", fill_value=1.0, unique_indices=True)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(rows: jax.Array, uses: Uses, num_samples: int, quantization: Quantization | None = None) -> jax.Array:
    """Return activations (num_samples, dim) of unique rows (num_unique, dim), as ``recv_activations`` does.

    quantization : (num_buckets, lower, upper), simulated; gradients pass straight through
    Differentiable by ``rows`` only.
    """
    seen = rows if quantization is None else quantize(Ops(jnp), rows, *quantization)
    taken = seen.at[uses.rows].get(mode="fill", fill_value=0.0) * uses.gains[:, None]
    return jax.ops.segment_sum(taken, uses.samples, num_samples, indices_are_sorted=True)


def _forward(
    rows: jax.Array, uses: Uses, num_samples: int, quantization: Quantization | None
) -> tuple[jax.Array, tuple[int, Uses]]:
    return lookup(rows, uses, num_samples, quantization), (rows.shape[0], uses)


def _backward(_: int, __: Quantization | None, kept: tuple[int, Uses], gradient: jax.Array) -> tuple[Any, None]:
    num_unique, uses = kept
    return row_gradients(gradient, uses, num_unique), None


lookup.defvjp(_forward, _backward)


def row_gradients(gradient: jax.Array, uses: Uses, num_unique: int) -> jax.Array:
    """Return the gradients of the unique rows, (num_unique, dim), from those of the activations."""
    taken = gradient.at[uses.samples].get(mode="fill", fill_value=0.0) * uses.gains[:, None]
    return jax.ops.segment_sum(taken, uses.rows, num_unique)


def apply(
    rule: UpdateRule,
    table: jax.Array,
    slots: tuple[jax.Array, ...],
    unique: Any,
    gradients: jax.Array,
    learning_rate: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the table and its slots after the optimizer's update of the unique rows; in place if donated.

    rule : ``config.table(name).rule``; UsageError for one with non-lazy updates, which change every row
    unique : ``uses.unique``; gradients : float32 (num_unique, dim), summed over all features of the table
    """
    if rule.non_lazy:
        raise UsageError(f"{rule.algorithm} with non-lazy updates changes every row; send its gradients to an Engine")
    places = Uses(unique, None, None, None)
    rate = jnp.asarray(learning_rate, table.dtype)
    new, new_slots = update(
        Ops(jnp), rule, rate, gradients, gather(table, places), tuple(gather(slot, places) for slot in slots)
    )
    written = [
        whole.at[unique].set(part, mode="drop", unique_indices=True)
        for whole, part in zip((table, *slots), (new, *new_slots), strict=True)
    ]
    return written[0], tuple(written[1:])
