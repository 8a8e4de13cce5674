"""Tables on a CPU: the FFI handlers in pyx/xla_handlers.pyx update them in place and copy no host array.

On a CPU the host's memory is the device's. All tables of an engine lie in one array, and a step is one call for all of
them. A program gets that array and, per device, a small constant array with the address of the tables' Step: host
memory that describes what to do with which rows and arrays. The constant is put on the devices once. A call passes only
arrays that are already there, compiles nothing whatever the number of rows, and does not depend on the caller's mesh or
transfer guard.

A call returns when its step is done. JAX runs a small program of one CPU device on the calling thread anyway. So the
caller may reuse its arrays at once, and nothing outlives the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from penstock.bridge.programs import AXIS, Program, compiled, row_sharding
from penstock.bridge.sharding import NUM_SHARDS, TableDefinition
from penstock.frames import Float32, Int64
from penstock.pyx import update
from penstock.updates import UpdateRule

# Floats per cache line.
LINE_FLOATS = 16
# The terms of a row-wise sum are on a thread's stack (MAX_SUMMED_DIM in pyx/update_equations.h).
MAX_SUMMED_DIM = 4096


@cache
def registered() -> bool:
    """Register the handlers; return whether this jaxlib accepts them. It refuses unknown versions of its interface."""
    try:
        for name, handler in update.handlers().items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception:  # of any type: the xla variant works everywhere
        return False
    return True


def possible(mesh: Mesh, rule: UpdateRule, dim: int) -> bool:
    """Return whether this variant can update a table: on one process's CPU, not by a user-defined program."""
    if rule.program is not None or rule_name(rule) not in update.rules():
        return False
    if rule.algorithm == "row_wise_adagrad" and dim > MAX_SUMMED_DIM:
        return False
    return mesh.devices.flat[0].platform == "cpu" and not mesh.is_multi_process and registered()


def rule_name(rule: UpdateRule) -> str:
    """Return the rule's name in pyx/update_rules.h. A power other than a square root is a separate rule."""
    hyper = dict(rule.hyper)
    if rule.algorithm == "stochastic_gradient_descent":
        return "sgd"
    with_pow = {"adagrad_momentum": hyper.get("exponent") != 2, "ftrl": hyper.get("lr_power") != -0.5}
    return f"{rule.algorithm}_pow" if with_pow.get(rule.algorithm) else rule.algorithm


def numbers(rule: UpdateRule) -> dict[str, float]:
    """Return a rule's parameters and switches as update.Plan takes them; a disabled limit is infinite."""
    inf = float("inf")
    switches = {
        "gradient_min": -inf if rule.gradient_min is None else rule.gradient_min,
        "gradient_max": inf if rule.gradient_max is None else rule.gradient_max,
        "weight_min": -inf if rule.weight_min is None else rule.weight_min,
        "weight_max": inf if rule.weight_max is None else rule.weight_max,
        "weight_decay": rule.weight_decay,
        "decay_times_learning_rate": rule.decay_times_learning_rate,
    }
    return dict(rule.hyper) | switches


@lru_cache(maxsize=256)
def create(mesh: Mesh, num_floats: int) -> Program:
    """Return a program: (step i32[n,3]) → the array, n * num_floats floats, of that step's tables, initialized."""

    def local(step: jax.Array) -> jax.Array:
        floats: jax.Array = jax.ffi.ffi_call("penstock_create", jax.ShapeDtypeStruct((num_floats,), np.float32))(step)
        return floats

    return _compiled(mesh, local, _step_shape(mesh))


@lru_cache(maxsize=256)
def touch(mesh: Mesh, num_floats: int) -> Program:
    """Return a program: (tables, step i32[n,3]) → the tables after the step, in place."""

    def local(floats: jax.Array, step: jax.Array) -> jax.Array:
        same = jax.ShapeDtypeStruct(floats.shape, floats.dtype)
        after: jax.Array = jax.ffi.ffi_call("penstock_touch", same, input_output_aliases={0: 0})(floats, step)
        return after

    floats = jax.ShapeDtypeStruct((mesh.size * num_floats,), np.float32, sharding=_rows(mesh))
    return _compiled(mesh, local, floats, _step_shape(mesh), donate_argnums=(0,))


class CpuTables:
    """BackendTables that lie in one array; every call returns when its work is done.

    Rows lie where ``Layout.place`` says; with DIV sharding on one device, in the order of their ids.

    threads : at most this many update one device's rows; 0: as many as XLA's pool has
    target : of ``update.targets()``; "": the best
    """

    variant = "ffi"
    problems: Sequence[str] = ()  # as of XlaTables: none, because nothing is compiled for a size
    copies_any_number = True

    def __init__(self, mesh: Mesh, definitions: Sequence[TableDefinition], threads: int = 0, target: str = "") -> None:
        if not registered():
            raise RuntimeError(f"the jaxlib of jax {jax.__version__} does not take penstock's handlers")
        self.mesh, self.layouts = mesh, [definition.layout for definition in definitions]
        self._starts = [definition.starts for definition in definitions]
        plans: list[update.Plan] = []
        for definition in definitions:
            # Start at a cache line, so that no two tables share one.
            first = -(-plans[-1].end // LINE_FLOATS) * LINE_FLOATS if plans else 0
            plans.append(_plan(definition, first, target))
        self._step = update.Step(plans, threads)
        self._operand = _operand(mesh, self._step)
        self._lock = threading.Lock()
        self._touch = touch(mesh, self._step.num_floats)
        self._step.start()
        self._array: jax.Array = create(mesh, self._step.num_floats)(self._operand).block_until_ready()
        self._step.release()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self._array,)

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], float]], step: int = 0, application: int = 0) -> None:
        self._run(self._step.update, updates)

    def write(self, member: int, ids: Int64 | int, values: Float32, part: int) -> None:
        self._run(self._step.copy, member, ids, values, part, True)

    def put(self, member: int, ids: Int64, parts: Sequence[Float32]) -> None:
        for part, values in enumerate(parts):
            self.write(member, ids, values, part)

    def create_rows(self, member: int, ids: Int64, weights: Iterable[Float32]) -> None:
        first = 0
        starts: list[Float32] = []
        for block in weights:
            starts = starts or [
                np.full((len(block), dim), start, np.float32)
                for dim, start in zip(self.layouts[member].part_dims[1:], self._starts[member], strict=True)
            ]
            block_ids = ids[first : first + len(block)]
            for part, values in enumerate([block, *starts]):
                self.write(member, block_ids, values[: len(block_ids)], part)
            first += len(block)

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        self._run(self._step.copy, member, ids, out, part, False)

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        self._run(self._step.copy_all, member, ids[: len(out)], out)
        return self.wait

    def key_by(self, member: int, keys: Callable[[Int64], Int64]) -> None:
        """Do nothing: no table here has 16-bit weights."""

    def wait(self) -> None:
        """Do nothing: every call waits."""

    def warm(self) -> int:
        """Return the number of programs, compiled when the tables were created."""
        return 2

    def _run(self, prepare: Callable[..., bool], *arguments: Any) -> None:
        """Prepare the step, then run it on all devices unless it is empty. Raises the errors of all devices."""
        with self._lock:
            if prepare(*arguments):
                self._array = self._touch(self._array, self._operand)
                self._array.block_until_ready()
                self._step.release()


def _plan(definition: TableDefinition, first_float: int, target: str) -> update.Plan:
    layout, rule = definition.layout, definition.rule
    return update.Plan(
        rule_name(rule),
        numbers(rule),
        (0.0, *definition.starts),
        layout.dim,
        layout.vocabulary_size,
        NUM_SHARDS,
        layout.mod,
        layout.rows_per_shard,
        layout.shards_per_device,
        rule.non_lazy,
        target,
        first_float,
        layout.name,
    )


def _rows(mesh: Mesh) -> Sharding:
    """Return a sharding that splits the first axis evenly over the devices."""
    return row_sharding(mesh) if mesh.size > 1 else SingleDeviceSharding(mesh.devices.flat[0])


def _operand(mesh: Mesh, step: update.Step) -> jax.Array:
    """Return int32[devices, 3]: the step's address, low half first, and the number of the device."""
    low, high = np.array([step.address], np.uint64).view(np.int32)
    rows = np.array([(low, high, device) for device in range(mesh.size)], np.int32)
    with jax.transfer_guard("allow"):
        operand: jax.Array = jax.device_put(rows, _rows(mesh)).block_until_ready()
    return operand


def _step_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size, 3), np.int32, sharding=_rows(mesh))


def _compiled(mesh: Mesh, local: Any, *shapes: jax.ShapeDtypeStruct, donate_argnums: tuple[int, ...] = ()) -> Program:
    """Compile ``local`` on each device ahead of time, so that calls do not depend on the context they are made in."""
    if mesh.size > 1:  # a single device does without a sharded program's overhead
        rows = PartitionSpec(AXIS)
        local = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * len(shapes), out_specs=rows, check_vma=False)
    return compiled(mesh, jax.jit(local, donate_argnums=donate_argnums), *shapes)
