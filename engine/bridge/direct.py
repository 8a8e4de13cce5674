"""A table on a CPU: updated in place by the handlers of pyx/update, which read the host's arrays where they lie.

On a CPU the host's memory is the device's. A program gets the table and, per device, one small constant
array that names the table's Step: host memory that says what to do with which arrays. The constant is put
on the devices once; a call passes nothing but arrays that are already there, compiles nothing whatever
the number of rows, and does not depend on the caller's mesh or transfer guard.

A call returns when its step is done. JAX runs a small program of one CPU device on the calling thread
anyway; so the arrays are the caller's again at once, and nothing outlives a table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.bridge.layout import NUM_SHARDS, Layout
from penstock.bridge.programs import AXIS, Program, row_sharding
from penstock.pyx import update
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# A row-wise sum has its terms on a thread's stack (MAX_SUMMED_DIM of pyx/update_rules.h).
MAX_SUMMED_DIM = 4096


@cache
def registered() -> bool:
    """Whether this jaxlib takes the handlers: it refuses versions of its interface that it does not know."""
    try:
        for name, handler in update.handlers().items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception:  # whatever its kind: the other variant works everywhere
        return False
    return True


def possible(mesh: Mesh, rule: UpdateRule, dim: int) -> bool:
    """Whether a table can be updated here: on a CPU, by a rule that is no program of the user's."""
    if rule.program is not None or rule_name(rule) not in update.rules():
        return False
    if rule.algorithm == "row_wise_adagrad" and dim > MAX_SUMMED_DIM:
        return False
    return mesh.devices.flat[0].platform == "cpu" and registered()


def rule_name(rule: UpdateRule) -> str:
    """The rule's name in pyx/update_rules.h. A power that is no square root is a rule of its own."""
    hyper = dict(rule.hyper)
    if rule.algorithm == "stochastic_gradient_descent":
        return "sgd"
    with_pow = {"adagrad_momentum": hyper.get("exponent") != 2, "ftrl": hyper.get("lr_power") != -0.5}
    return f"{rule.algorithm}_pow" if with_pow.get(rule.algorithm) else rule.algorithm


def numbers(rule: UpdateRule) -> dict[str, float]:
    """A rule's parameters and switches as update.Plan takes them; a limit that is off is infinite."""
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
def create(mesh: Mesh, shape: tuple[int, int, int]) -> Program:
    """(step i32[n,3]) → the table that the step's plan describes, every part at its start."""

    def local(step: jax.Array) -> jax.Array:
        part = jax.ShapeDtypeStruct((shape[0] // mesh.size, *shape[1:]), np.float32)
        table: jax.Array = jax.ffi.ffi_call("penstock_create", part)(step)
        return table

    rows = PartitionSpec(AXIS)
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    return _compiled(mesh, program, _step_shape(mesh))


@lru_cache(maxsize=256)
def touch(mesh: Mesh, shape: tuple[int, int, int]) -> Program:
    """(table, step i32[n,3]) → the table after the step, in place."""

    def local(table: jax.Array, step: jax.Array) -> jax.Array:
        same = jax.ShapeDtypeStruct(table.shape, table.dtype)
        after: jax.Array = jax.ffi.ffi_call("penstock_touch", same, input_output_aliases={0: 0})(table, step)
        return after

    rows = PartitionSpec(AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    program = jax.jit(mapped, donate_argnums=(0,))
    table = jax.ShapeDtypeStruct(shape, np.float32, sharding=row_sharding(mesh))
    return _compiled(mesh, program, table, _step_shape(mesh))


class DirectTable:
    """See ``tables.DeviceTable``, whose methods these are.

    threads : that update one device's rows at most; 0: as many as XLA's pool has
    target : of ``update.targets()``; "": the best
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        rule: UpdateRule,
        starts: Sequence[float],
        threads: int = 0,
        target: str = "",
    ) -> None:
        if not registered():
            raise RuntimeError(f"the jaxlib of jax {jax.__version__} does not take penstock's handlers")
        self.layout, self._non_lazy = layout, rule.non_lazy
        plan = update.Plan(
            rule_name(rule),
            numbers(rule),
            (0.0, *starts),
            layout.dim,
            layout.vocabulary_size,
            NUM_SHARDS,
            layout.mod,
            layout.rows_per_shard,
            layout.shards_per_device,
            rule.non_lazy,
            threads,
            target,
        )
        self._step = update.Step(plan)
        self._operand = _operand(mesh, self._step)
        self._lock = threading.Lock()
        self._touch = touch(mesh, layout.shape)
        self.array: jax.Array = create(mesh, layout.shape)(self._operand).block_until_ready()

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.array,)

    def apply(
        self, segments: Sequence[tuple[Int64, Float32]], learning_rate: float, step: int = 0, turn: int = 0
    ) -> None:
        if not self._non_lazy and not any(len(ids) for ids, _ in segments):
            return
        with self._lock:
            self._step.update(segments, learning_rate)
            self._run()

    def write(self, ids: Int64 | int, values: Float32, part: int) -> None:
        with self._lock:
            self._step.copy(ids, values, part, True)
            self._run()

    def read(self, ids: Int64 | int, out: Float32, part: int) -> None:
        with self._lock:
            self._step.copy(ids, out, part, False)
            self._run()

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        with self._lock:
            self._step.copy_all(ids[: out.shape[1]], out)
            self._run()
        return self.wait

    def drain(self) -> None:
        """Nothing is under way: every call has waited."""

    def wait(self) -> None:
        """Nothing to wait for: every call has."""

    def warm(self) -> int:
        """The table's two programs were compiled when it was made."""
        return 2

    def _run(self) -> None:
        """What the step has been set to. An error of one device, or more, comes out here."""
        self.array = self._touch(self.array, self._operand)
        self.array.block_until_ready()
        self._step.release()


def _operand(mesh: Mesh, step: update.Step) -> jax.Array:
    """int32[devices, 3]: the step's address, low half first, and the number of the device."""
    low, high = np.array([step.address], np.uint64).view(np.int32)
    rows = np.array([(low, high, device) for device in range(mesh.size)], np.int32)
    with jax.transfer_guard("allow"):
        operand: jax.Array = jax.device_put(rows, row_sharding(mesh)).block_until_ready()
    return operand


def _step_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size, 3), np.int32, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))


def _compiled(mesh: Mesh, program: jax.stages.Wrapped, *shapes: jax.ShapeDtypeStruct) -> Program:
    """Compiled once and for all: a call then asks for nothing of the context it is made in."""
    with jax.set_mesh(mesh):
        return program.lower(*shapes).compile()
