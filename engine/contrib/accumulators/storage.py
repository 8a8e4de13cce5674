"""The stores behind the gate of a sparse conditional accumulator: sums, and per row the number of gradients in it.

Three with the same four methods (KernelSums: the fast path;
NumpySums: float16, which has no kernel, and rows without elements; TensorFlowSums: TensorFlow's merge
with its quirks). They neither validate nor lock. ``add`` and ``take`` change a store as their last
action, so a failed allocation in NumPy leaves it unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError
from penstock.model.frames import Array, Int64, Rows
from penstock.model.overflows import overflows_of
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_accumulate import Intake

State = dict[str, Array]


def sparse_sums(dtype: np.dtype[Any], width: int, tf_compat: bool) -> KernelSums | NumpySums:
    """Return the store for rows of a dtype and width."""
    if tf_compat:
        return TensorFlowSums(dtype, width)
    return KernelSums(dtype, width) if width and dtype.itemsize >= 4 else NumpySums(dtype, width)


class KernelSums:
    """A store for float32 and float64, in pyx: sums the rows of an id in arrival order, without the GIL.

    width : elements per row, all axes but the first flattened
    """

    def __init__(self, dtype: np.dtype[Any], width: int) -> None:
        self.width = width
        self._accumulator, self._intake = Accumulator(width, dtype), Intake()

    def add(self, ids: Int64, values: Array, number: int) -> None:
        """Add a gradient. ids (n,), values (n, width) contiguous; number : gradients before it since the last take

        Raises InputError, and adds nothing, where finite values have a sum that is not; TensorFlowSums takes it.
        """
        # A caller that unpacks bytes itself may pass unaligned arrays.
        rows = Rows(np.require(ids, None, ["C", "ALIGNED"]), np.require(values, None, ["C", "ALIGNED"]))
        intake = self._intake
        if intake.begin([self._accumulator], [[rows]], number):
            intake.add()
            if intake.work():
                intake.end()
                return
            intake.undo()
            self._check(rows)
            intake.begin([self._accumulator], [[rows]], number)
        else:
            intake.check(1)
            if intake.work() and intake.may_overflow:
                try:
                    self._check(rows)
                except InputError:
                    intake.cancel()
                    raise
        intake.add(strict=False)  # TensorFlow sums NaN and infinities
        intake.work()
        intake.end()

    def _check(self, rows: Rows) -> None:
        """Raise InputError at a row at which a sum leaves the finite range, if all rows are finite."""
        if np.isfinite(rows.grads).all():
            overflows = overflows_of([rows], self._accumulator.sums())[0]
            check_sums(rows.ids, overflows, rows.grads.dtype)

    def take(self, mean: bool) -> tuple[Int64, Array]:
        """Return ids (u,) and rows (u, width), each divided by dtype(its count) if mean, and empty the store."""
        (total,) = self._accumulator.sums()
        order = np.argsort(total.ids)
        # take, not total.sums[order], which raises SystemError when memory runs out.
        ids, values = total.ids[order], total.sums.take(order, axis=0)
        if mean:  # one divisor per value: NumPy 2.4 crashes where it has no memory to broadcast a column of them
            counts = self._accumulator.counts()[order].astype(values.dtype)
            np.divide(values.ravel(), np.repeat(counts, values.shape[1]), out=values.ravel())
        self._accumulator.drain()
        return ids, values

    def get_state(self) -> State:
        """Return copies of ids (u,), values (u, width) and counts (u,)."""
        state = self._accumulator.get_state()
        return {"ids": state["ids"], "values": state["sums"], "counts": state["counts"]}

    def set_state(self, state: State) -> None:
        """Restore the result of ``get_state`` into a new store."""
        # No later gradient has the number -1, so each one counts its ids again.
        frames = np.full(len(state["ids"]), -1, np.int64)
        sums = {"ids": state["ids"], "sums": state["values"], "counts": state["counts"], "frames": frames}
        self._accumulator.set_state(sums)


def check_sums(ids: Int64, overflows: npt.NDArray[np.bool_], dtype: np.dtype[Any]) -> None:
    """Raise InputError for the first of these rows, with which, or with whose id, a sum leaves the finite range."""
    if overflows.any():
        row_id = ids[int(overflows.argmax())]
        problem = f"gradient: expected sums that are finite as {dtype}, and that of id {row_id} is not"
        raise InputError(problem, reason="sum_not_finite")


class NumpySums:
    """A NumPy store for any dtype: float16 rounds at every addition, as in TensorFlow."""

    def __init__(self, dtype: np.dtype[Any], width: int) -> None:
        self.width = width
        self._dtype = dtype
        self._clear()

    def _clear(self) -> None:
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._values = np.empty((0, self.width), self._dtype)

    def add(self, ids: Int64, values: Array, number: int) -> None:
        num_before = len(self._ids)
        merged, positions = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        # -0.0 is the identity of addition for every number; 0.0 would turn -0.0 into 0.0.
        sums = np.full((len(merged), self.width), -0.0, self._dtype)
        sums[positions[:num_before]] = self._values
        with np.errstate(all="ignore"):
            np.add.at(sums, positions[num_before:], values)
        if not np.isfinite(sums).all() and np.isfinite(values).all():
            before = np.ones(len(merged), bool)
            before[positions[:num_before]] = np.isfinite(self._values).all(axis=1)
            leaves = before & ~np.isfinite(sums).all(axis=1)
            check_sums(ids, leaves[positions[num_before:]], self._dtype)
        counts = np.zeros(len(merged), np.int64)
        counts[positions[:num_before]] = self._counts
        counts[np.unique(positions[num_before:])] += 1
        self._ids, self._values, self._counts = merged, sums, counts

    def take(self, mean: bool) -> tuple[Int64, Array]:
        ids, values = self._ids, self._values
        if mean:
            with np.errstate(all="ignore"):
                values = np.asarray(values / self._counts.astype(values.dtype)[:, None])
        self._clear()
        return ids, values

    def get_state(self) -> State:
        return {"ids": self._ids.copy(), "values": self._values.copy(), "counts": self._counts.copy()}

    def set_state(self, state: State) -> None:
        self._ids, self._counts = np.array(state["ids"], np.int64), np.array(state["counts"], np.int64)
        self._values = np.array(state["values"], self._dtype)


class TensorFlowSums(NumpySums):
    """A bit-exact SparseConditionalAccumulator::AddToAccumGradFunction: correct for ascending, distinct ids only.

    The first gradient is stored as it arrives. Each further one is merged as if both lists were ascending
    without repeats; other ids end up in several rows.
    """

    def add(self, ids: Int64, values: Array, number: int) -> None:
        if number == 0:
            merged = ids.copy(), values.copy(), np.ones(len(ids), np.int64)
        else:
            merged = self._merged(ids, values)
        self._ids, self._values, self._counts = merged

    def _merged(self, ids: Int64, values: Array) -> tuple[Int64, Array, Int64]:
        old, new = self._ids.tolist(), ids.tolist()
        pairs: list[tuple[int, int]] = []  # (accumulated row, new row) that merge into one row; -1: none
        i = j = 0
        while i < len(old) or j < len(new):
            has_old = i < len(old) and (j == len(new) or old[i] <= new[j])
            has_new = j < len(new) and (i == len(old) or new[j] <= old[i])
            pairs.append((i if has_old else -1, j if has_new else -1))
            i, j = i + has_old, j + has_new
        of_old, of_new = np.array(pairs, np.int64).reshape(-1, 2).T
        only_new, both = of_old < 0, (of_old >= 0) & (of_new >= 0)
        merged, counts = np.empty(len(pairs), np.int64), np.ones(len(pairs), np.int64)
        sums = np.empty((len(pairs), self.width), self._dtype)
        merged[~only_new], sums[~only_new] = self._ids[of_old[~only_new]], self._values[of_old[~only_new]]
        counts[~only_new] = self._counts[of_old[~only_new]]
        merged[only_new], sums[only_new] = ids[of_new[only_new]], values[of_new[only_new]]
        with np.errstate(all="ignore"):
            sums[both] = values[of_new[both]] + sums[both]
        counts[both] += 1
        return merged, sums, counts
