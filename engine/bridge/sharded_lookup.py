"""Lookups and updates of tables that are sharded by row, inside a user's ``jax.jit`` and ``shard_map``.

Like ``penstock.bridge.lookup``, but table and batch are sharded over the devices of a mesh axis in contiguous blocks: a
device requests the rows of its samples from its peers and sends their gradients back. The host finds and sorts those
rows for all devices at once (``sharded_uses``). The devices then sum over sorted segments in a fixed order: by sample,
then by lookup, then by peer. All functions but ``sharded_uses`` and ``rows_per_shard`` are traced, and see one device's
part of each argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.bridge import lookup as one_device
from penstock.bridge.lookup import Quantization
from penstock.bridge.programs import AXIS
from penstock.errors import UsageError
from penstock.updates import Ops, UpdateRule, quantize

Int32 = npt.NDArray[np.int32]


class Room(NamedTuple):
    """Sizes to pad arrays to, each per device: a program is compiled once per Room.

    asked : distinct rows that one device requests from one peer; lookups : of one device
    owned : distinct rows of one device that any device requests
    """

    asked: int
    lookups: int
    owned: int


class ShardedUses(NamedTuple):
    """The lookups of one table on all devices; shard axis 0, the devices. Inside ``shard_map`` it has size 1.

    asked : int32, shape (devices, devices, asked), row numbers within each peer's block; pads lie beyond the block
    inverse, samples : int32, shape (devices, lookups), index into all requested rows; sample, ascending
    gains : float32, shape (devices, lookups)
    order, segments : int32, shape (devices, lookups), the lookups sorted by row, and the row of each
    owned : int32, shape (devices, owned), the device's rows that are requested; pads are distinct, beyond the block
    merge, merged : int32, shape (devices, devices * asked), the order that sorts incoming gradients by row, and the
        index in owned of each
    """

    asked: Any
    inverse: Any
    samples: Any
    gains: Any
    order: Any
    segments: Any
    owned: Any
    merge: Any
    merged: Any


def rows_per_shard(vocabulary_size: int, num_devices: int) -> int:
    """Return the rows of each device's block; a sharded table has num_devices times as many, the last ones unused."""
    return -(-vocabulary_size // num_devices)


def sharded_uses(
    unique_ids: Any, uses: Sequence[Any], vocabulary_size: int, num_samples: Sequence[int], num_devices: int, room: Room
) -> ShardedUses:
    """Return the lookups of every device, as NumPy arrays.

    unique_ids : of the table; uses : of its features; both as in deduplication data
    num_samples : of every feature, over all devices: each device has an equal, contiguous share of the samples, and its
        activations are those of the first feature, then of the next
    Raises UsageError if the samples do not divide evenly or the rows and lookups exceed ``room``.
    """
    if any(number % num_devices for number in num_samples):
        raise UsageError(f"samples {list(num_samples)} cannot be dealt to {num_devices} devices evenly")
    per_shard = rows_per_shard(vocabulary_size, num_devices)
    if (per_shard + room.owned) > np.iinfo(np.int32).max:
        raise UsageError(f"a block of {per_shard} rows has rows beyond int32; use more devices")
    asked = np.full((num_devices, num_devices, room.asked), per_shard, np.int32)
    found = []
    for device in range(num_devices):
        ids, samples, gains = _share(np.asarray(unique_ids), uses, num_samples, num_devices, device)
        inverse = _ask(ids, per_shard, asked[device], device)
        found.append(_padded_lookups(inverse, samples, gains, num_devices, sum(num_samples) // num_devices, room))
    owners = [_merge(asked[:, owner].reshape(-1), per_shard, room.owned, owner) for owner in range(num_devices)]
    return ShardedUses(asked, *map(np.stack, zip(*found, strict=True)), *map(np.stack, zip(*owners, strict=True)))


def _share(unique_ids: Any, uses: Sequence[Any], num_samples: Sequence[int], n: int, device: int) -> tuple[Any, ...]:
    """Return a device's lookups: ids, the device's numbers of their samples, gains."""
    ids, samples, gains, before = [], [], [], 0
    for feature, number in zip(uses, num_samples, strict=True):
        share = number // n
        start, stop = np.searchsorted(feature.samples, [device * share, (device + 1) * share]).tolist()
        ids.append(unique_ids[feature.rows[start:stop]])
        samples.append(feature.samples[start:stop].astype(np.int64) - device * share + before)
        gains.append(np.ones(stop - start, np.float32) if feature.gains is None else feature.gains[start:stop])
        before += share
    return np.concatenate(ids), np.concatenate(samples), np.concatenate(gains)


def _ask(ids: Any, per_shard: int, asked: Int32, device: int) -> Any:
    """Fill ``asked`` with the rows that a device requests from each peer; return the index of every id into it."""
    unique, inverse = np.unique(ids, return_inverse=True)
    owners, rows = np.divmod(unique, per_shard)
    firsts = np.searchsorted(owners, np.arange(len(asked)))
    places = np.arange(len(unique)) - firsts[owners]
    _check_room("rows asked of one peer", int(places.max(initial=-1)) + 1, asked.shape[1], device)
    asked[owners, places] = rows
    return (owners * asked.shape[1] + places)[inverse]


def _padded_lookups(inverse: Any, samples: Any, gains: Any, n: int, num_samples: int, room: Room) -> tuple[Any, ...]:
    """Return inverse, samples, gains, order and segments of ShardedUses; pads are out of range and sort last."""
    _check_room("lookups", len(inverse), room.lookups, None)
    rows = np.full(room.lookups, n * room.asked, np.int32)
    whose, by = np.full(room.lookups, num_samples, np.int32), np.zeros(room.lookups, np.float32)
    rows[: len(inverse)], whose[: len(inverse)], by[: len(inverse)] = inverse, samples, gains
    order = np.argsort(rows, kind="stable").astype(np.int32)
    return rows, whose, by, order, rows[order]


def _merge(asked: Any, per_shard: int, room: int, owner: int) -> tuple[Int32, Int32, Int32]:
    """Return owned, merge and merged of ShardedUses. asked : rows requested from one owner, peer after peer"""
    merge = np.argsort(asked, kind="stable").astype(np.int32)
    unique, inverse = np.unique(asked, return_inverse=True)
    number = int(np.searchsorted(unique, per_shard))  # the entry after these is the pad
    _check_room("rows that are asked for", number, room, owner)
    owned = per_shard + np.arange(room, dtype=np.int32)
    owned[:number] = unique[:number]
    merged = np.where(inverse < number, inverse, room).astype(np.int32)
    return owned, merge, merged[merge]


def _check_room(what: str, number: int, room: int, device: int | None) -> None:
    if number > room:
        where = "" if device is None else f" of device {device}"
        raise UsageError(f"{number} {what}{where} do not fit {room}; make room for more")


# ---- traced, inside shard_map


def ask(table: jax.Array, uses: ShardedUses, axis: str = AXIS) -> jax.Array:
    """Return the rows that this device requested, (devices * asked, dim). table : its block of a table or of a slot"""
    wanted = jax.lax.all_to_all(uses.asked[0], axis, 0, 0, tiled=True)
    # Pads are ones, not zeros: they are never read, but a division by zero would trip jax_debug_nans.
    rows = table.at[wanted].get(mode="fill", fill_value=1.0)
    answers: jax.Array = jax.lax.all_to_all(rows, axis, 0, 0, tiled=True)
    return answers.reshape(-1, table.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(rows: jax.Array, uses: ShardedUses, num_samples: int, quantization: Quantization | None = None) -> jax.Array:
    """Return this device's activations (num_samples, dim) from the rows that it requested.

    num_samples : of this device, over all features; quantization : (num_buckets, lower, upper), simulated
    Differentiable by ``rows`` only; gradients pass straight through the quantization.
    """
    seen = rows if quantization is None else quantize(Ops(jnp), rows, *quantization)
    taken = seen.at[uses.inverse[0]].get(mode="fill", fill_value=0.0) * uses.gains[0][:, None]
    return jax.ops.segment_sum(taken, uses.samples[0], num_samples, indices_are_sorted=True)


def _forward(
    rows: jax.Array, uses: ShardedUses, num_samples: int, quantization: Quantization | None
) -> tuple[jax.Array, tuple[int, ShardedUses]]:
    return lookup(rows, uses, num_samples, quantization), (rows.shape[0], uses)


def _backward(
    _: int, __: Quantization | None, kept: tuple[int, ShardedUses], gradient: jax.Array
) -> tuple[jax.Array, None]:
    num_rows, uses = kept
    order = uses.order[0]
    taken = gradient.at[uses.samples[0][order]].get(mode="fill", fill_value=0.0) * uses.gains[0][order][:, None]
    return jax.ops.segment_sum(taken, uses.segments[0], num_rows, indices_are_sorted=True), None


lookup.defvjp(_forward, _backward)


def apply(
    rule: UpdateRule,
    table: jax.Array,
    slots: tuple[jax.Array, ...],
    uses: ShardedUses,
    gradients: jax.Array,
    learning_rate: Any,
    axis: str = AXIS,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return this device's blocks of the table and its slots after the optimizer's update; in place if donated.

    gradients : of the rows that this device requested, (devices * asked, dim); the rows' owners sum them over devices
    """
    devices, room = uses.asked[0].shape
    sent = jax.lax.all_to_all(gradients.reshape(devices, room, -1), axis, 0, 0, tiled=True)
    came = sent.reshape(devices * room, -1)[uses.merge[0]]
    owned = uses.owned[0]
    summed = jax.ops.segment_sum(came, uses.merged[0], owned.shape[0], indices_are_sorted=True)
    return one_device.apply(rule, table, slots, owned, summed, learning_rate)
