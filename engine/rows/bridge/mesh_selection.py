"""The choice of an engine's devices: jax is loaded only where it may find an accelerator, or a table needs it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol

from penstock.base.integrations import PROCESSES
from penstock.model.frames import Int32
from penstock.rows.bridge.devices import AnyMesh, HostMesh, platform, reason_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

log = logging.getLogger("penstock")

# Files of accelerators: NVIDIA's GPUs and TPUs. MISSED : in the reason for the host, although there is one
DEV, CHIPS, MISSED = Path("/dev"), ("nvidia[0-9]*", "accel[0-9]*"), ", and this machine has "
# Environment variables that name a plugin of jax which is no Python package.
LIBRARIES = ("TPU_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS")


class ProcessGroup(Protocol):
    """The processes that a mesh spans (``contrib/meshes`` has them). rank : of this process; count : of processes"""

    rank: int
    count: int

    def agree(self, call: str, numbers: Sequence[int] | Int32 = ()) -> Int32:
        """Return the numbers of all processes, int32 (processes, numbers), once all have made this call."""

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context whose error the other processes raise too."""


def make_mesh(mesh: AnyMesh | None = None) -> AnyMesh:
    """Return a one-axis mesh over the devices of ``mesh`` in its order; None: those that jax finds, else the host.

    Raises UsageError, CapacityError.
    """
    if mesh is None:
        return default_mesh()
    if isinstance(mesh, HostMesh):
        return mesh
    from penstock.rows.bridge import jax_devices

    return jax_devices.one_axis(mesh.devices)


def default_mesh(count: int | None = None) -> AnyMesh:
    """Return the accelerators that jax finds, without loading it where it finds none: then the host.

    count : the first so many accelerators, or parts of the host's memory; None: all accelerators, or one part
    Raises UsageError if jax finds no device, or fewer.
    """
    reason = "" if "jax" in sys.modules else _reason_for_the_host()
    if reason:
        mesh: AnyMesh = HostMesh(count or 1, reason)
    else:
        from penstock.rows.bridge import jax_devices

        mesh = jax_devices.default_mesh(count)
    level = logging.WARNING if MISSED in reason else logging.INFO
    log.log(level, "tables on %d %s: %s", mesh.size, platform(mesh), reason_of(mesh) or "found by jax")
    return mesh


def _reason_for_the_host() -> str:
    """Return why jax would find no accelerator; "": it must be asked. Without a plugin it knows only the CPU."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return f"JAX_PLATFORMS is '{platforms}'" if platforms.split(",")[0] == "cpu" else ""
    namespace = find_spec("jax_plugins")
    modules = iter_modules(namespace.submodule_search_locations) if namespace is not None else ()
    if any(modules) or find_spec("libtpu") or any(map(os.environ.get, LIBRARIES)) or entry_points(group="jax_plugins"):
        return ""
    chips = sorted(path for pattern in CHIPS for path in DEV.glob(pattern))
    return "no plugin of jax for accelerators is installed" + (f"{MISSED}{chips[0]}" if chips else "")


def on_jax(mesh: AnyMesh) -> Mesh:
    """Return a mesh of jax: for parts of the host's memory, of as many CPU devices, or those that there are.

    Raises ConfigError if jax may not use its CPU devices.
    """
    if not isinstance(mesh, HostMesh):
        return mesh
    from penstock.rows.bridge import jax_devices

    return jax_devices.cpu_mesh(mesh.size)


def processes_of(mesh: AnyMesh) -> ProcessGroup | None:
    """Return the processes that a mesh spans; None: only this one. Raises UsageError."""
    if isinstance(mesh, HostMesh) or not mesh.is_multi_process:
        return None
    processes: ProcessGroup = import_module(PROCESSES["agreement"]).Processes(mesh)
    return processes
