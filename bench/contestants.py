"""The contestants of a case: a ``Side`` runs steps, and returns results for the check.

A ``Way`` is how a library does a kind of case: a few functions over one table. ``PerTable`` turns it into a Side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.bench.distributions import Int64
from penstock.bench.workloads import Float32, Step, TableSize, Workload

# The names of sides: penstock, its baselines, and a bare Flight client whose server discards everything.
OURS, REPLAY, STATIC, DISCARDED = "penstock", "penstock_replay", "penstock_static", "bare_flight"

# The kinds of cases, and the number of slots that each needs in addition to the weights.
SLOTS = {"coalesce": 0, "sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2, "ftrl": 2} | dict.fromkeys(
    ("replay", "doput", "dynamic"), 1
)
UPDATES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
# Adagrad, with gradients from a file or over the network, or for the keys of a dynamic table.
AS_ADAGRAD = ("replay", "doput", "dynamic")

# The initial state and the hyperparameters of every side; ``expected`` in check.py computes the result. The weight is
# small: thousands of small steps added to a large one would be lost to rounding.
WEIGHT, ACCUMULATOR, RATE = 1 / 64, 0.1, 0.05
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def initial_parts(kind: str, table: TableSize) -> list[tuple[tuple[int, int], float]]:
    """Return (shape, value) of the weights and of each slot; row-wise Adagrad has one number per row."""
    shape = (table.vocabulary_size, table.dim)
    slot = (shape[0], 1) if kind == "rowwise_adagrad" else shape
    accumulator = 0.0 if kind == "adam" else ACCUMULATOR
    return [(shape, WEIGHT), (slot, accumulator), (slot, 0.0)][: 1 + SLOTS[kind]]


class Runner(Protocol):
    """A contestant: runs the steps of a case."""

    def prepare(self, steps: Sequence[int]) -> None:
        """Prepare the next ``run`` of these steps; not timed."""

    def run(self, steps: Sequence[int]) -> None:
        """Run these of the distinct steps one after the other, and return when all work is done."""


class Side(Runner, Protocol):
    """A contestant with sums or weights, which are checked."""

    def read_rows(self, table: str, ids: Int64) -> Float32:
        """Return, after one step, the sums of these ids (coalesce) or their weights: float32 (n, dim)."""


@dataclass(frozen=True)
class Way:
    """One way of a library to do a kind of case, table by table.

    name : in reports; package : the import name of the required package
    convert : numpy → the library's array; not timed
    state : table → its state; not called for coalesce
    forward : (state, ids) → the argument of ``step`` in place of the ids; not timed. For a library that updates in its
        backward pass, which needs a forward pass
    step : (state, ids, grads) → anything that ``finish`` waits for; for coalesce (unique ids, sums)
    read_rows : (state, ids) → weights; not called for coalesce, whose result is converted by ``to_numpy``
    slow : takes part only if peers are "all"
    ids_kept : of a way without gradients, a result → number of rows whose ids it contains; reported without a ratio
    corrects_bias : Adam with bias correction, which torch has and TensorFlow on TPU has not
    """

    name: str
    package: str
    kind: str
    step: Callable[[Any, Any, Any], Any]
    convert: Callable[[npt.NDArray[Any]], Any] = lambda array: array
    state: Callable[[TableSize], Any] = lambda table: None
    forward: Callable[[Any, Any], Any] | None = None
    read_rows: Callable[[Any, Any], Any] = lambda state, ids: state[ids]
    finish: Callable[[Any], Any] = lambda result: result
    to_numpy: Callable[[Any], npt.NDArray[Any]] = np.asarray
    ids_kept: Callable[[Any], int] | None = None
    slow: bool = False
    corrects_bias: bool = False

    def num_bytes(self, workload: Workload) -> int:
        """Return the approximate memory in bytes: converted inputs, the result of a step, and tables with slots."""
        tables = 0 if self.kind == "coalesce" else (1 + SLOTS[self.kind]) * workload.table_bytes
        return tables + (workload.num_steps + 2) * workload.step_bytes


@dataclass(frozen=True)
class KeyWay:
    """One way of a library to number keys of 64 bits: the row of each, where a new key gets one.

    name, package, convert, finish, to_numpy, slow : as for a Way
    create : capacity → an empty state
    number : (state, distinct keys) → their numbers; new keys get one
    look_up : the same for keys that all have a number; None: ``number``
    """

    name: str
    package: str
    create: Callable[[int], Any]
    number: Callable[[Any, Any], Any]
    look_up: Callable[[Any, Any], Any] | None = None
    convert: Callable[[npt.NDArray[Any]], Any] = lambda array: array
    finish: Callable[[Any], Any] = lambda result: result
    to_numpy: Callable[[Any], npt.NDArray[Any]] = np.asarray
    slow: bool = False


AnyWay = Way | KeyWay


@dataclass
class PerTable:
    """A Way over all tables of a workload."""

    way: Way
    workload: Workload
    steps: Sequence[Step]
    _inputs: list[dict[str, tuple[Any, Any]]] = field(init=False)
    _states: dict[str, Any] = field(init=False)
    _last: dict[str, Any] = field(init=False, default_factory=dict)
    _forwards: dict[tuple[int, str], Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        convert, state = self.way.convert, self.way.state
        self._inputs = [{n: (convert(i), convert(g)) for n, (i, g) in step.parts.items()} for step in self.steps]
        self._states = {t.name: None if self.way.kind == "coalesce" else state(t) for t in self.workload.tables}

    def prepare(self, steps: Sequence[int]) -> None:
        if self.way.forward is not None:
            for number in steps:
                for name, (ids, _) in self._inputs[number].items():
                    self._forwards[number, name] = self.way.forward(self._states[name], ids)

    def run(self, steps: Sequence[int]) -> None:
        for number in steps:
            for name, (ids, grads) in self._inputs[number].items():
                ids = self._forwards.pop((number, name), ids)
                self._last[name] = self.way.step(self._states[name], ids, grads)
        for result in self._last.values():
            self.way.finish(result)

    def ids_lost(self) -> int:
        """Rows of the last step whose ids are not in the results."""
        assert self.way.ids_kept is not None
        return self.workload.rows - sum(self.way.ids_kept(result) for result in self._last.values())

    def read_rows(self, table: str, ids: Int64) -> Float32:
        to_numpy = self.way.to_numpy
        if self.way.kind == "coalesce":
            unique, sums = self._last[table]
            return look_up(to_numpy(unique), to_numpy(sums), ids)
        return np.asarray(to_numpy(self.way.read_rows(self._states[table], self.way.convert(ids))), np.float32)


def look_up(unique: npt.NDArray[Any], sums: npt.NDArray[Any], ids: Int64) -> Float32:
    """Return the sums of ids; NaN for a missing id, and for all of them if ``unique`` contains an id twice."""
    result = np.full((len(ids), sums.shape[1]), np.nan, np.float32)
    order = np.argsort(unique, kind="stable")
    ranked = unique[order]
    if len(ranked) and not (ranked[1:] == ranked[:-1]).any():
        positions = np.minimum(np.searchsorted(ranked, ids), len(ranked) - 1)
        is_present = ranked[positions] == ids
        result[is_present] = sums[order[positions[is_present]]]
    return result
