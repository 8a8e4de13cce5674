"""What an engine needs of jax's devices: meshes of them, and arrays of whole tables. Loads jax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.base.errors import ConfigError, UsageError
from penstock.model.frames import Float32
from penstock.rows.bridge.devices import AXIS, AnyMesh, HostMesh


def one_axis(devices: Any) -> Mesh:
    """Return a mesh of one axis over devices in their order. devices : array or list of jax.Device"""
    return Mesh(np.asarray(devices).reshape(-1), (AXIS,))


def local_mesh() -> Mesh:
    """Return a mesh over all local devices of jax's default platform. Raises UsageError if there are none."""
    try:
        return one_axis(jax.local_devices())
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        if platforms:
            problem = f"JAX_PLATFORMS is '{platforms}' and there is no such device here: unset it, or set it to cpu"
            raise UsageError(problem) from error
        reason = str(error).partition("\n")[0]
        raise UsageError(f"jax finds no device: {reason}") from error


def default_mesh(count: int | None) -> AnyMesh:
    """Return ``devices.default_mesh`` where jax decides."""
    mesh = local_mesh()
    kind = mesh.devices.flat[0].platform
    if kind == "cpu":
        return HostMesh(count or 1, "jax's default platform is cpu")
    if count is not None and count > mesh.size:
        raise UsageError(f"--devices {count}: there are {mesh.size} {kind.upper()} devices here")
    return one_axis(mesh.devices[:count])


def cpu_mesh(size: int) -> Mesh:
    """Return a mesh over ``size`` of jax's CPU devices, or all if there are fewer. Raises ConfigError."""
    try:
        return one_axis(jax.local_devices(backend="cpu")[:size])
    except RuntimeError as error:
        raise ConfigError(
            "tables in the host's memory that XLA updates need jax's platform cpu, and JAX_PLATFORMS is "
            f"'{os.environ.get('JAX_PLATFORMS')}'; add ',cpu' to it, or unset it"
        ) from error


def whole_array(mesh: Mesh, rows: int, floats: int, read: Callable[[int, int], Float32]) -> jax.Array:
    """Return a float32 array (rows, floats), sharded by row over a mesh if that divides it, else replicated.

    read : (first, stop) → those rows
    """
    spec = PartitionSpec(mesh.axis_names) if rows % mesh.size == 0 else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    blocks: dict[int, Float32] = {}  # by the first row; every device of this process may want all of them
    with jax.set_mesh(one_axis(mesh.devices)), jax.transfer_guard("allow"):
        shards = []
        for device, index in sharding.addressable_devices_indices_map((rows, floats)).items():
            assert index is not None
            first, stop, _ = index[0].indices(rows)
            if first not in blocks:
                blocks = {first: read(first, stop)}
            shards.append(jax.device_put(blocks[first], device))
        return jax.make_array_from_single_device_arrays((rows, floats), sharding, shards)
