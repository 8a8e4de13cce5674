"""A user's own step on a device (``penstock.bridge.gather``, a loss, ``apply``): its bits, its sums, and its time.

The batch has ids of a Zipf distribution, a quarter as many samples as lookups. A device that sums by gathers must do so
in the order that engine/rows/bridge/segment_sums.py documents; NumPy does the same here, one value after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from penstock.bench.device_cases import batch_of
from penstock.model.frames import Float32
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import Table, apply, backends, gather
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.functional_table import Format
from penstock.rows.bridge.programs import row_sharding
from penstock.rows.bridge.segment_sums import MOST_TERMS, RUN

RATE, STEPS = 0.1, 3


class OwnStep:
    """A table, and the lookups of a batch in it, on one device. rule : of its updates"""

    def __init__(self, mesh: Any, table: DeviceTable, variant: str, rule: UpdateRule, lookups: int) -> None:
        self.by_gathers = backends.sums_by_gathers(mesh)
        self.rule, self._device_table, self._backend = rule, table, table.backend
        self.on_host = batch_of(table.layout, self.by_gathers, lookups)
        self._uses = jax.device_put(self.on_host, row_sharding(mesh))
        self._format = Format(table.layout.line, mesh, variant)
        self._step = jax.jit(self._trained, donate_argnums=0)

    @property
    def table(self) -> Table:
        backend: Any = self._backend
        return Table(tuple(backend.arrays), (), self._format)

    def _keep(self, table: Table) -> None:
        backend: Any = self._backend
        backend.arrays = table.arrays

    def _trained(self, table: Table, uses: Any) -> Table:
        def loss(activations: dict[str, jax.Array]) -> jax.Array:
            return sum(((part - 1) ** 2).sum() for part in activations.values()) / 2  # type: ignore[return-value]

        return apply(self.rule, table, uses, jax.grad(loss)(gather(table, uses)), RATE)

    def train(self) -> list[bytes]:
        """Run some steps; return the bits of the table."""
        for _ in range(STEPS):
            self._keep(self._step(self.table, self._uses))
        return [np.asarray(array).tobytes() for array in self.table.arrays]

    def sums_are_numpys(self) -> bool:
        """Return whether activations, and the summed gradients that are subtracted, have the bits of NumPy's sums.

        Of a table with SGD. All gains are 1, and so is the rate: no product is rounded.
        """
        uses, layout = self.on_host, self._device_table.layout
        lookups = int(np.count_nonzero(uses.gains))
        samples, numbers, ids = uses.samples[0, :lookups], uses.rows[0, :lookups], np.arange(layout.vocabulary_size)
        before = self._device_table.read(ids)
        by_device = before[np.argsort(layout.locate(ids)[1])]
        activations = np.asarray(jax.jit(gather)(self.table, self._uses)["f"])
        rows = by_device[uses.asked[0, 0][numbers]]
        if activations.tobytes() != self.in_order(samples, len(activations), rows).tobytes():
            return False
        gradients = np.random.default_rng(1).standard_normal(activations.shape, np.float32)
        subtract = jax.jit(partial(apply, self.rule), donate_argnums=0)
        self._keep(subtract(self.table, self._uses, {"f": gradients}, 1.0))
        expected, asked = by_device.copy(), uses.asked[0, 0][: numbers.max() + 1]
        expected[asked] -= self.in_order(numbers, len(asked), gradients[samples])
        return self._device_table.read(ids)[np.argsort(layout.locate(ids)[1])].tobytes() == expected.tobytes()

    def in_order(self, segments: npt.NDArray[np.int32], num_segments: int, values: Float32) -> Float32:
        """Return the sum of the values of every segment, in the order of the device."""
        if self.by_gathers:
            return sums_by_runs(segments, num_segments, values)
        sums = np.zeros((num_segments, values.shape[1]), np.float32)
        np.add.at(sums, segments, values)
        return sums

    def lookups_per_second(self, per_round: Callable[[Callable[[int], object]], float]) -> float:
        """Return them, of steps in a loop of one program. per_round : the seconds of a round of such a loop"""

        @partial(jax.jit, donate_argnums=0)
        def loop(table: Table, uses: Any, rounds: Any) -> Table:
            trained: Table = jax.lax.fori_loop(0, rounds, lambda _, table: self._trained(table, uses), table)
            return trained

        def run(rounds: int) -> object:
            self._keep(loop(self.table, self._uses, np.int32(rounds)))
            return self.table

        return float(np.count_nonzero(self.on_host.gains) / per_round(run))

    @property
    def least_bytes(self) -> float:
        """The bytes per lookup that a step must move at least.

        Touched lines read and written, activations written, their gradients read, and the lookups' arrays read once.
        """
        line, uses = self._device_table.layout.line, self.on_host
        activations = sum(8 * line.dim * size for (_, (size,)) in uses.features)
        lookups = sum(array.nbytes for array in jax.tree.leaves(uses))
        return float(2 * uses.counts.sum() * line.nbytes(1) + activations + lookups) / np.count_nonzero(uses.gains)


def sums_by_runs(segments: npt.NDArray[Any], num_segments: int, values: Float32) -> Float32:
    """Return the sum of the values of every segment, float32 (num_segments, width), as a device sums by gathers."""
    sums = np.zeros((num_segments, values.shape[1]), np.float32)
    order = np.argsort(segments, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(segments[order])) + 1):
        terms = list(values[part])
        while len(terms) > MOST_TERMS:
            terms = [sum(terms[start : start + RUN]) for start in range(0, len(terms), RUN)]
        if terms:
            sums[segments[part[0]]] = sum(terms)
    return sums
