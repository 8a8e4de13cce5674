"""Tables in the host's memory: penstock's own, updated in place by its kernels on its threads (pyx/update.pyx).

All tables of an engine lie in one array per part of the host, and a step is one call for all of them. It reads the
caller's arrays where they lie, and compiles nothing whatever the number of rows. It returns when its work is done: the
caller may reuse its arrays at once.

A device of a HostMesh, or a CPU device of a mesh of jax, is a part of the host's memory with some of the rows. Nothing
here needs jax.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.threads import ThreadTeam
from penstock.model.frames import Float32, Int64
from penstock.model.updates import UpdateRule
from penstock.model.updates.rule import Rate
from penstock.pyx import update
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_steps import FrameSteps
from penstock.pyx.gate_counts import GateCounts
from penstock.pyx.locked_calls import call_under
from penstock.rows.bridge.devices import AnyMesh, platform
from penstock.rows.bridge.sharding import NUM_SHARDS, Layout, TableDefinition

# Allocates an array of zeros: (what it is for, length, dtype) → array.
Allocate = Callable[[str, int, npt.DTypeLike], npt.NDArray[Any]]

# Floats per cache line.
LINE_FLOATS = 16
# Threads that count the pages that they write (MOST_WRITERS in pyx/page_counters.h); no more update tables then.
MOST_COUNTING = 1025
# The terms of a row-wise sum are on a thread's stack (MAX_SUMMED_DIM in pyx/update_equations.h).
MAX_SUMMED_DIM = 4096


def obstacle(mesh: AnyMesh, layout: Layout, rule: UpdateRule) -> str:
    """Return why this variant cannot update a table; "" if it can."""
    obstacles = {
        "its devices are accelerators": platform(mesh) != "cpu",
        "the mesh spans several processes": mesh.is_multi_process,
        "its rule is a program": rule.program is not None,
        "penstock has no equation in C for its rule": rule_name(rule) not in update.rules(),
        f"a row with a mean of squares has more than {MAX_SUMMED_DIM} weights": rule.row_slots > 0
        and layout.dim > MAX_SUMMED_DIM,
        "its weights have 16 bits": layout.bfloat16,
        "its rows share lines": layout.line.masked,
    }
    return next((reason for reason, applies in obstacles.items() if applies), "")


def rule_name(rule: UpdateRule) -> str:
    """Return the rule's name in pyx/update_rules.h. A power other than a square root is a separate rule."""
    hyper = dict(rule.hyper)
    if rule.algorithm == "stochastic_gradient_descent":
        return "sgd"
    with_pow = {"adagrad_momentum": hyper.get("exponent") != 2, "ftrl": hyper.get("lr_power") != -0.5}
    return f"{rule.algorithm}_pow" if with_pow.get(rule.algorithm) else rule.algorithm


def numbers(rule: UpdateRule) -> dict[str, float]:
    """Return a rule's parameters and switches as update.TableRule takes them; a disabled limit is infinite."""
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


class HostTables:
    """BackendTables that lie in one array per device; every call returns when its work is done.

    Rows lie where ``Layout.locate`` says; with DIV sharding on one device, in the order of their ids.

    team : the threads that update rows; target : of ``accumulator.targets()``; "": the best
    allocate : the memory of rows and of the counters of their pages

    arrays : of each device, float32 (n,); rules : where in them each table lies, and what updates it
    counters : of the pages of each device, uint64 (threads, n), once they are counted
    """

    variant, compiler = "host", "penstock's kernels"
    problems: Sequence[str] = ()  # as of XlaTables: none, because nothing is compiled for a size
    copies_any_number = True

    def __init__(
        self,
        mesh: AnyMesh,
        definitions: Sequence[TableDefinition],
        team: ThreadTeam,
        target: str = "",
        allocate: Allocate | None = None,
    ) -> None:
        self.mesh, self.layouts = mesh, [definition.layout for definition in definitions]
        # Of each table, the floats of the slots of a row that nothing has updated.
        self._starts = [np.repeat(table.starts, table.layout.part_dims[1:]) for table in definitions]
        rules: list[update.TableRule] = []
        for definition in definitions:
            # Start at a cache line, so that no two tables share one.
            first = -(-rules[-1].end // LINE_FLOATS) * LINE_FLOATS if rules else 0
            rules.append(_table_rule(definition, first, target))
        self._allocate, num_parts = allocate or zeros, self.layouts[0].num_devices
        self.rules, self.counters = rules, tuple[npt.NDArray[np.uint64], ...]()
        self.arrays = tuple(self._allocate("rows", rules[-1].end, np.float32) for _ in range(num_parts))
        for array in self.arrays:
            for rule, layout, starts in zip(rules, self.layouts, self._starts, strict=True):
                array[rule.first_float : rule.end].reshape(-1, rule.row_floats)[:, layout.dim :] = starts
        self._step, self._team = update.Step(rules, self.arrays), team
        self._lock = threading.Lock()

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], Rate]], step: int = 0, application: int = 0) -> None:
        call_under(self._lock, self._run, self._step.update, updates)

    def write(self, member: int, ids: Int64 | int, values: Float32, part: int) -> None:
        call_under(self._lock, self._run, self._step.copy, member, ids, values, part, True)

    def put(self, member: int, ids: Int64, rows: Float32) -> None:
        call_under(self._lock, self._run, self._step.copy, member, ids, rows, None, True)

    def create_rows(self, member: int, ids: Int64, weights: Iterable[Float32]) -> None:
        first, dim = 0, self.layouts[member].dim
        for block in weights:
            rows = np.empty((len(block), self.rules[member].row_floats), np.float32)
            rows[:, :dim], rows[:, dim:] = block, self._starts[member]
            self.put(member, ids[first : first + len(block)], rows)
            first += len(block)

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        call_under(self._lock, self._run, self._step.copy, member, ids, out, part, False)

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        call_under(self._lock, self._run, self._step.copy, member, ids[: len(out)], out, None, False)
        return self.wait

    def key_by(self, member: int, keys: Callable[[Int64], Int64]) -> None:
        """Do nothing: no table here has 16-bit weights."""

    def count_pages(self) -> None:
        """Count the writes of every page of rows from now on, so that rows can be read without a lock."""
        if not self.counters:
            with self._lock:
                shape = (min(self._team.threads + 1, MOST_COUNTING), self._step.counters_per_thread)
                size = shape[0] * shape[1]
                self.counters = tuple(self._allocate("pages", size, np.uint64).reshape(shape) for _ in self.arrays)
                self._step.count_pages(self.counters)

    def note_steps(self, words: npt.NDArray[np.uint64]) -> None:
        """Begin and end the steps of ``frame_steps`` in words of StepWords from now on."""
        with self._lock:
            self._step.note_steps(words)

    def view(self, member: int) -> Float32:
        """Return the weights of a table that has one part, in id order: read-only, without a copy."""
        rule, layout = self.rules[member], self.layouts[member]
        floats = np.frombuffer(self.arrays[0].data.toreadonly(), np.float32)  # for good
        rows = floats[rule.first_float : rule.end].reshape(-1, rule.row_floats)
        return rows[: layout.vocabulary_size, : layout.dim]

    def frame_steps(self, member: int, gate: GateCounts, sums: Accumulator, mean: bool) -> FrameSteps:
        """Return the way of frames of one table without Python. gate, sums : which they enter; mean : of the sums"""
        return FrameSteps(gate, sums, self._step, self._lock, member, mean)

    def take_not_finite(self) -> tuple[int, int, int] | None:
        """Return how many rows updates have made infinite or NaN since the last call, and member and id of the first.

        A row counts once, until it is written. None: none
        """
        result = self._step.take_not_finite()
        if result is None:
            return None
        num_rows, (member, device, row) = result
        return num_rows, member, self.layouts[member].id_at(device, row)

    def wait(self) -> None:
        """Do nothing: every call waits."""

    def warm(self) -> int:
        """Return 0: nothing is compiled."""
        return 0

    def _run(self, prepare: Callable[..., None], *arguments: Any) -> None:
        """Prepare the step, then run it, under the lock."""
        prepare(*arguments)
        self._step.run(self._team.run, self._team.threads)


def zeros(kind: str, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of 0, in huge pages where they are many. Pages that are never written take no memory."""
    memory = mmap.mmap(-1, max(1, count) * np.dtype(dtype).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count)


def _table_rule(definition: TableDefinition, first_float: int, target: str) -> update.TableRule:
    layout, rule = definition.layout, definition.rule
    return update.TableRule(
        rule_name(rule),
        numbers(rule),
        dim=layout.dim,
        vocabulary_size=layout.vocabulary_size,
        num_shards=NUM_SHARDS,
        mod=layout.mod,
        rows_per_shard=layout.rows_per_shard,
        shards_per_device=layout.shards_per_device,
        non_lazy=rule.non_lazy,
        target=target,
        first_float=first_float,
        name=layout.name,
    )
