"""Tables on a CPU: updated in place by the handlers of pyx/update, which read the host's arrays where they lie.

On a CPU the host's memory is the device's. All tables of an engine lie in one array, and a step is one call for all
of them. A program gets that array and, per device, one small constant array that names the tables' Step: host memory
that says what to do with which rows and arrays. The constant is put on the devices once; a call passes nothing but
arrays that are already there, compiles nothing whatever the number of rows, and does not depend on the caller's mesh
or transfer guard.

A call returns when its step is done. JAX runs a small program of one CPU device on the calling thread
anyway; so the arrays are the caller's again at once, and nothing outlives the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from penstock.bridge.programs import AXIS, Program, row_sharding
from penstock.bridge.sharding import NUM_SHARDS, Layout
from penstock.pyx import update
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

Segments = Sequence[tuple[Int64, Float32]]

# Of a cache line.
LINE_FLOATS = 16
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
def create(mesh: Mesh, num_floats: int) -> Program:
    """(step i32[n,3]) → the array of n * num_floats floats with the tables of that step, every part at its start."""

    def local(step: jax.Array) -> jax.Array:
        floats: jax.Array = jax.ffi.ffi_call("penstock_create", jax.ShapeDtypeStruct((num_floats,), np.float32))(step)
        return floats

    return _compiled(mesh, jax.jit(_on_each(mesh, local, 1)), _step_shape(mesh))


@lru_cache(maxsize=256)
def touch(mesh: Mesh, num_floats: int) -> Program:
    """(tables, step i32[n,3]) → the tables after the step, in place."""

    def local(floats: jax.Array, step: jax.Array) -> jax.Array:
        same = jax.ShapeDtypeStruct(floats.shape, floats.dtype)
        after: jax.Array = jax.ffi.ffi_call("penstock_touch", same, input_output_aliases={0: 0})(floats, step)
        return after

    program = jax.jit(_on_each(mesh, local, 2), donate_argnums=(0,))
    floats = jax.ShapeDtypeStruct((mesh.size * num_floats,), np.float32, sharding=_rows(mesh))
    return _compiled(mesh, program, floats, _step_shape(mesh))


class DirectStack:
    """Tables that lie in one array and are updated by one call.

    starts : of the slots, by table
    threads : that update one device's rows at most; 0: as many as XLA's pool has
    target : of ``update.targets()``; "": the best
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: Sequence[Layout],
        rules: Sequence[UpdateRule],
        starts: Sequence[Sequence[float]],
        threads: int = 0,
        target: str = "",
    ) -> None:
        if not registered():
            raise RuntimeError(f"the jaxlib of jax {jax.__version__} does not take penstock's handlers")
        self.members = {layout.name: member for member, layout in enumerate(layouts)}
        plans: list[update.Plan] = []
        for layout, rule, its in zip(layouts, rules, starts, strict=True):
            # Whole cache lines: no two tables share one.
            first = -(-plans[-1].end // LINE_FLOATS) * LINE_FLOATS if plans else 0
            plans.append(_plan(layout, rule, its, first, target))
        self._step = update.Step(plans, threads)
        self._operand = _operand(mesh, self._step)
        self._lock = threading.Lock()
        self._touch = touch(mesh, self._step.num_floats)
        self._step.start()
        self.array: jax.Array = create(mesh, self._step.num_floats)(self._operand).block_until_ready()
        self._step.release()

    def apply(self, brought: Sequence[tuple[int, Sequence[Any], float]]) -> None:
        """One optimizer application to the rows of several tables: (which of them, its segments, its rate) each.

        segments : as ``update.Step.update`` takes them
        """
        with self._lock:
            if self._step.update(brought):
                self._run()

    def copy(self, member: int, ids: Int64 | int, values: Float32, part: int, write: bool) -> None:
        with self._lock:
            self._step.copy(member, ids, values, part, write)
            self._run()

    def copy_all(self, member: int, ids: Int64, out: Float32) -> None:
        with self._lock:
            self._step.copy_all(member, ids, out)
            self._run()

    def _run(self) -> None:
        """What the step has been set to. An error of one device, or more, comes out here."""
        self.array = self._touch(self.array, self._operand)
        self.array.block_until_ready()
        self._step.release()


class DirectTable:
    """One table of a stack. See ``tables.DeviceTable``, whose methods these are."""

    def __init__(self, among: DirectStack, layout: Layout) -> None:
        self.among, self.layout = among, layout
        self._member = among.members[layout.name]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.among.array,)

    def apply(self, segments: Segments, learning_rate: float, step: int = 0, turn: int = 0) -> None:
        self.among.apply([(self._member, segments, learning_rate)])

    def write(self, ids: Int64 | int, values: Float32, part: int) -> None:
        self.among.copy(self._member, ids, values, part, True)

    def read(self, ids: Int64 | int, out: Float32, part: int) -> None:
        self.among.copy(self._member, ids, out, part, False)

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        self.among.copy_all(self._member, ids[: out.shape[1]], out)
        return self.wait

    def drain(self) -> None:
        """Nothing is under way: every call has waited."""

    def wait(self) -> None:
        """Nothing to wait for: every call has."""

    def warm(self) -> int:
        """The stack's two programs were compiled when it was made."""
        return 2


def _plan(layout: Layout, rule: UpdateRule, starts: Sequence[float], first_float: int, target: str) -> update.Plan:
    return update.Plan(
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
        target,
        first_float,
        layout.name,
    )


def _on_each(mesh: Mesh, local: Callable[..., jax.Array], num_arguments: int) -> Callable[..., jax.Array]:
    """On every device with what it has; on a single one without the calls that a sharded program costs."""
    if mesh.size == 1:
        return local
    rows = PartitionSpec(AXIS)
    specs = (rows,) * num_arguments
    mapped: Callable[..., jax.Array] = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped


def _rows(mesh: Mesh) -> Sharding:
    """The first axis cut evenly over the devices."""
    return row_sharding(mesh) if mesh.size > 1 else SingleDeviceSharding(mesh.devices.flat[0])


def _operand(mesh: Mesh, step: update.Step) -> jax.Array:
    """int32[devices, 3]: the step's address, low half first, and the number of the device."""
    low, high = np.array([step.address], np.uint64).view(np.int32)
    rows = np.array([(low, high, device) for device in range(mesh.size)], np.int32)
    with jax.transfer_guard("allow"):
        operand: jax.Array = jax.device_put(rows, _rows(mesh)).block_until_ready()
    return operand


def _step_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size, 3), np.int32, sharding=_rows(mesh))


def _compiled(mesh: Mesh, program: jax.stages.Wrapped, *shapes: jax.ShapeDtypeStruct) -> Program:
    """Compiled once and for all: a call then asks for nothing of the context it is made in."""
    with jax.set_mesh(mesh):
        return program.lower(*shapes).compile()
