"""Looking up and updating tables that are sharded by row, inside a user's own ``jax.jit`` and ``shard_map``.

As ``lookup`` beside it, but the table lies over the devices of a mesh axis in blocks of neighbouring rows, and so does
the batch: a device asks its peers for the rows that its samples look up, and sends their gradients back. Which rows
those are is found out and sorted on the host (``sharded_uses``), for all devices at once; the device's sums then run
over sorted segments, and in one order: by sample, then by lookup, then by peer. Everything here but ``sharded_uses``
and ``rows_per_shard`` is traced, and sees its own device's part of each argument.
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
    """Sizes that arrays are padded to, each per device: a program is compiled once per Room.

    asked : different rows that one device asks of one peer; lookups : of one device
    owned : different rows of one device that anybody asks for
    """

    asked: int
    lookups: int
    owned: int


class ShardedUses(NamedTuple):
    """The lookups of one table, of all devices; axis 0 is theirs, to be sharded. Inside ``shard_map`` that axis is 1.

    asked : int32, shape (devices, devices, asked), rows asked of each peer as it numbers its own; pads lie beyond
    inverse, samples : int32, shape (devices, lookups), index into all rows asked for, and whose lookup it is, ascending
    gains : float32, shape (devices, lookups)
    order, segments : int32, shape (devices, lookups), the lookups sorted by row, and the row of each
    owned : int32, shape (devices, owned), own rows that are asked for; pads lie beyond, each apart
    merge, merged : int32, shape (devices, devices * asked), what comes in sorted by row, and where in owned each goes
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
    """Rows of every device's block; a sharded table has num_devices times as many, the last ones unused."""
    return -(-vocabulary_size // num_devices)


def sharded_uses(
    unique_ids: Any, uses: Sequence[Any], vocabulary_size: int, num_samples: Sequence[int], num_devices: int, room: Room
) -> ShardedUses:
    """What every device looks up, as NumPy arrays.

    unique_ids : of the table, and uses : of its features, as deduplication data has them
    num_samples : of every feature, over all devices: each device has an equal share of neighbouring samples, and its
        activations are those of the first feature, then of the next
    UsageError where they do not fit.
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
    """A device's lookups: ids, its own numbers of their samples, gains."""
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
    """Write down which rows a device asks of each peer. Returns the index of every id into them."""
    unique, inverse = np.unique(ids, return_inverse=True)
    owners, rows = np.divmod(unique, per_shard)
    firsts = np.searchsorted(owners, np.arange(len(asked)))
    places = np.arange(len(unique)) - firsts[owners]
    _check_room("rows asked of one peer", int(places.max(initial=-1)) + 1, asked.shape[1], device)
    asked[owners, places] = rows
    return (owners * asked.shape[1] + places)[inverse]


def _padded_lookups(inverse: Any, samples: Any, gains: Any, n: int, num_samples: int, room: Room) -> tuple[Any, ...]:
    """inverse, samples, gains, order and segments of ShardedUses; pads lie beyond, and sort last."""
    _check_room("lookups", len(inverse), room.lookups, None)
    rows = np.full(room.lookups, n * room.asked, np.int32)
    whose, by = np.full(room.lookups, num_samples, np.int32), np.zeros(room.lookups, np.float32)
    rows[: len(inverse)], whose[: len(inverse)], by[: len(inverse)] = inverse, samples, gains
    order = np.argsort(rows, kind="stable").astype(np.int32)
    return rows, whose, by, order, rows[order]


def _merge(asked: Any, per_shard: int, room: int, owner: int) -> tuple[Int32, Int32, Int32]:
    """owned, merge and merged of ShardedUses: the rows that peers ask of one owner, each peer's after the other's."""
    merge = np.argsort(asked, kind="stable").astype(np.int32)
    unique, inverse = np.unique(asked, return_inverse=True)
    number = int(np.searchsorted(unique, per_shard))  # what is beyond is the pad
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
    """The rows that this device asked for, (devices * asked, dim), of its block of a table or of one of its slots."""
    wanted = jax.lax.all_to_all(uses.asked[0], axis, 0, 0, tiled=True)
    # Pads are ones, not zeros: nobody reads them, but a division by zero would trip jax_debug_nans.
    rows = table.at[wanted].get(mode="fill", fill_value=1.0)
    answers: jax.Array = jax.lax.all_to_all(rows, axis, 0, 0, tiled=True)
    return answers.reshape(-1, table.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(rows: jax.Array, uses: ShardedUses, num_samples: int, quantization: Quantization | None = None) -> jax.Array:
    """This device's activations (num_samples, dim) of the rows that it asked for.

    num_samples : of this device, over all features; quantization : (num_buckets, lower, upper), simulated
    Differentiable by ``rows``, and by those alone; gradients pass straight through the quantization.
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
    """This device's blocks of the table and its slots after the optimizer's update; donate them to have it in place.

    gradients : of the rows that this device asked for, (devices * asked, dim); summed over devices by the rows' owners
    """
    devices, room = uses.asked[0].shape
    sent = jax.lax.all_to_all(gradients.reshape(devices, room, -1), axis, 0, 0, tiled=True)
    came = sent.reshape(devices * room, -1)[uses.merge[0]]
    owned = uses.owned[0]
    summed = jax.ops.segment_sum(came, uses.merged[0], owned.shape[0], indices_are_sorted=True)
    return one_device.apply(rule, table, slots, owned, summed, learning_rate)
