"""What takes part in a case: a ``Side`` runs steps, and shows what came of them so that it can be checked.

A library's own way is a ``Way``: a few functions over one table; ``PerTable`` makes a Side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.bench.distributions import Int64
from penstock.bench.workloads import Float32, Step, TableSize, Workload

# The kinds of cases: what is done with a step, and the slots that it needs beside the weights.
SLOTS = {"coalesce": 0, "sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2, "ftrl": 2, "replay": 1, "doput": 1}
UPDATES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
WAYS_IN = ("replay", "doput")  # Adagrad again, whose gradients come another way

# What every side starts from and learns with; ``expected`` in check.py says what must come of it. The weight is
# small: thousands of small steps added to a large one, one by one, would be lost to rounding.
WEIGHT, ACCUMULATOR, RATE = 1 / 64, 0.1, 0.05
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Side(Protocol):
    """One who does a case's steps."""

    def prepare(self, steps: Sequence[int]) -> None:
        """What the next ``run`` of these steps takes for granted; not timed."""

    def run(self, steps: Sequence[int]) -> None:
        """Do these of the distinct steps, one after the other, and come back when all is done."""

    def seen(self, table: str, ids: Int64) -> Float32:
        """After one step: the sums of these ids (coalesce), or their weights. float32 (n, dim)"""


@dataclass(frozen=True)
class Way:
    """One way of a library to do a kind of case, table by table.

    name : as it is reported; package : what must be installed, as it is imported
    convert : numpy → the library's array, before anything is timed
    state : what is kept for a table; not called for coalesce
    forward : (state, ids) → what ``step`` gets instead of the ids; not timed. For a library whose backward pass is
        its update, and needs a forward pass before it
    step : (state, ids, grads) → anything that ``finish`` waits for; for coalesce (unique ids, sums)
    seen : (state, ids) → weights; not called for coalesce, whose result goes through ``to_numpy``
    slow : left out unless peers are "all"
    ids_kept : of a way that takes no gradients, a result → how many rows' ids it held; stands apart, without a ratio
    corrects_bias : Adam whose averages are corrected, as torch's are and TensorFlow's on TPU are not
    """

    name: str
    package: str
    kind: str
    step: Callable[[Any, Any, Any], Any]
    convert: Callable[[npt.NDArray[Any]], Any] = lambda array: array
    state: Callable[[TableSize], Any] = lambda table: None
    forward: Callable[[Any, Any], Any] | None = None
    seen: Callable[[Any, Any], Any] = lambda state, ids: state[ids]
    finish: Callable[[Any], Any] = lambda result: result
    to_numpy: Callable[[Any], npt.NDArray[Any]] = np.asarray
    ids_kept: Callable[[Any], int] | None = None
    slow: bool = False
    corrects_bias: bool = False

    def num_bytes(self, workload: Workload) -> int:
        """Memory that it needs, roughly: inputs of its own, what comes of a step, and tables with their slots."""
        tables = 0 if self.kind == "coalesce" else (1 + SLOTS[self.kind]) * workload.table_bytes
        return tables + (workload.num_steps + 2) * workload.step_bytes


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

    def seen(self, table: str, ids: Int64) -> Float32:
        to_numpy = self.way.to_numpy
        if self.way.kind == "coalesce":
            unique, sums = self._last[table]
            return look_up(to_numpy(unique), to_numpy(sums), ids)
        return np.asarray(to_numpy(self.way.seen(self._states[table], self.way.convert(ids))), np.float32)


def look_up(unique: npt.NDArray[Any], sums: npt.NDArray[Any], ids: Int64) -> Float32:
    """The sums of ids; a missing one is NaN, and so is every one where an id comes twice."""
    found = np.full((len(ids), sums.shape[1]), np.nan, np.float32)
    order = np.argsort(unique, kind="stable")
    ranked = unique[order]
    if len(ranked) and not (ranked[1:] == ranked[:-1]).any():
        at = np.minimum(np.searchsorted(ranked, ids), len(ranked) - 1)
        there = ranked[at] == ids
        found[there] = sums[order[at[there]]]
    return found
