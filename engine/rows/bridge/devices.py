"""The devices of an engine: parts of the host's memory, or a mesh of jax, which this module does not load.

A ``HostMesh`` stands where a mesh of jax's CPU devices could: it has what penstock uses of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jax.sharding import Mesh

# The axis of a mesh of jax.
AXIS = "shard"


class HostDevice(NamedTuple):
    """A part of the host's memory, with the attributes of a device of jax."""

    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


@dataclass(frozen=True)
class HostMesh:
    """The host's memory in ``size`` parts. reason : why the tables are there"""

    size: int = 1
    reason: str = field(default="", compare=False)
    is_multi_process: ClassVar[bool] = False

    @property
    def devices(self) -> npt.NDArray[Any]:
        devices = np.empty(self.size, object)
        devices[:] = self.local_devices
        return devices

    @property
    def local_devices(self) -> list[HostDevice]:
        return [HostDevice(number) for number in range(self.size)]


AnyMesh: TypeAlias = "HostMesh | Mesh"
# The devices of tables that are placed on the host.
HOST = HostMesh(reason="the configuration places the table there")


def reason_of(mesh: AnyMesh) -> str:
    """Return why the tables are in the host's memory; "" for those of jax."""
    return mesh.reason if isinstance(mesh, HostMesh) else ""


def platform(mesh: AnyMesh) -> str:
    name: str = mesh.devices.flat[0].platform
    return name


def check_memory(placed: Iterable[tuple[AnyMesh, int]]) -> None:
    """Raise MemoryError if tables on CPU devices exceed the host's memory. placed : the bytes of tables on a mesh

    Linux overcommits memory and kills the process when it runs out. An accelerator's allocator raises an error.
    """
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_cpu = [(mesh, num_bytes) for mesh, num_bytes in placed if platform(mesh) == "cpu"]
    num_bytes = sum(num_bytes * len(mesh.local_devices) // mesh.size for mesh, num_bytes in on_cpu)
    if num_bytes > has:
        raise MemoryError(
            f"the tables with their slots need {num_bytes / 1e9:.1f} GB, this machine has {has / 1e9:.1f} GB"
        )
