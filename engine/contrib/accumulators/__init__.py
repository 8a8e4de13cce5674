"""The conditional accumulators, dense and sparse: a gate and the sums behind it.

They have the semantics of TensorFlow's ConditionalAccumulator and SparseConditionalAccumulator
(conditional_accumulator_base.h, sparse_conditional_accumulator.h) where those are right;
docs/accumulators.md lists the differences. Any number of threads may apply and take. taker_gate.py decides
when to open, gradient_checks.py which gradients to accept, and storage.py how to sum them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError, StateError
from penstock.base.validation import whole
from penstock.contrib.accumulators.conditional import Conditional
from penstock.contrib.accumulators.storage import sparse_sums
from penstock.core.gradient_checks import (
    contributor_of,
    dense_problem,
    ids_of,
    sizes_of,
    sparse_problem,
    sparse_row_problem,
    values_of,
)
from penstock.model.frames import Array, Contributor


class SparseGradient(NamedTuple):
    """The result of a sparse take.

    Attributes
    ----------
    indices : numpy.ndarray
        int64, shape (n,), ascending and distinct (with ``tf_compat``: as TensorFlow's merge leaves them).
    values : numpy.ndarray
        Of the accumulator's dtype, shape (n, ...).
    dense_shape : numpy.ndarray
        int64, shape (1 + rank of a row,): the declared first dim or -1, then the shape of a row.

    References
    ----------
    ``tf.IndexedSlices``

    Examples
    --------
    >>> import penstock as ps
    >>> accumulator = ps.SparseConditionalAccumulator(shape=(100, 2))
    >>> accumulator.apply_gradient([7], [[1.0, 2.0]])
    True
    >>> indices, values, dense_shape = accumulator.take_gradient(1)
    >>> indices, values, dense_shape
    (array([7]), array([[1., 2.]], dtype=float32), array([100,   2]))
    """

    indices: npt.NDArray[np.int64]
    values: Array
    dense_shape: npt.NDArray[np.int64]


class ConditionalAccumulator(Conditional[Array]):
    """An accumulator that sums dense gradients until as many have arrived as a taker requires.

    Parameters
    ----------
    dtype : {"float16", "float32", "float64"} or dtype
        Gradients are summed in it, in arrival order.
    shape : sequence of int or None
        Required of gradients. None, or dims of -1, where unknown: the first gradient after a take then fixes it.
    reduction : {"MEAN", "SUM"}
        "MEAN" divides by the number of gradients, "SUM" does not.

    Raises
    ------
    UsageError
        If an argument is invalid.

    Notes
    -----
    Any number of threads may apply and take; docs/accumulators.md lists the differences from TensorFlow.

    References
    ----------
    ``tf.compat.v1.ConditionalAccumulator``

    Examples
    --------
    >>> import penstock as ps
    >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
    >>> accumulator.apply_gradient([1.0, 2.0]), accumulator.apply_gradient([3.0, 6.0])
    (True, True)
    >>> accumulator.take_gradient(num_required=2)
    array([2., 4.], dtype=float32)
    >>> accumulator.apply_gradient([1.0, 2.0], local_step=0)  # stale: the take incremented the step
    False
    """

    def __init__(self, dtype: Any = "float32", shape: Any = None, reduction: str = "MEAN") -> None:
        super().__init__(dtype, shape, reduction)
        self._sum: Array | None = None  # in the dtype, in arrival order

    def apply_gradient(self, value: Any, local_step: int = 0, contributor: Contributor = None) -> bool:
        """Add one gradient.

        Parameters
        ----------
        value : array_like
            Of the accumulator's dtype and shape, or (nested) numbers.
        local_step : int
            The step that the gradient was computed at; if it is behind the global step, the gradient is stale.
        contributor : str, int or None
            The sender, for ``explain`` and ``stale``.

        Returns
        -------
        bool
            False for a stale gradient: it is dropped whatever its shape, and counted.

        Raises
        ------
        InputError
            For a wrong shape or dtype; nothing is added then.
        UsageError
            For a wrong ``local_step`` or ``contributor``.
        CancelledError
            After ``close``.

        References
        ----------
        TensorFlow's ``AccumulatorApplyGradient``

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,), reduction="SUM")
        >>> accumulator.apply_gradient([1.0, 2.0]), accumulator.apply_gradient([3.0, 6.0])
        (True, True)
        >>> accumulator.take_gradient(2)
        array([4., 8.], dtype=float32)
        """
        step, who = whole("local_step", local_step), contributor_of(contributor)
        array = values_of(value, self.dtype)

        def add() -> None:
            problem = dense_problem(array.shape, self.shape, None if self._sum is None else self._sum.shape)
            if problem is not None:
                raise InputError(problem)
            if self._sum is None:
                self._sum = array.copy()
            else:
                with np.errstate(all="ignore"):  # TensorFlow overflows to inf silently
                    np.add(self._sum, array, out=self._sum)

        return self._gate.admit(step, add, who)

    def _produce(self, num: int) -> Array:
        value = self._sum
        assert value is not None  # the gate opens only after a gradient was admitted
        if self._mean:
            with np.errstate(all="ignore"):
                value = np.asarray(value / value.dtype.type(num))
        self._sum = None
        return value

    def _sum_state(self) -> dict[str, Any]:
        return {} if self._sum is None else {"value": self._sum.copy()}

    def _checked(self, num: int, state: dict[str, Any]) -> Callable[[], None]:
        value = np.array(values_of(state["value"], self.dtype)) if num else None
        problem = None if value is None else dense_problem(value.shape, self.shape, None)
        if problem is not None:
            raise StateError(problem)
        return lambda: setattr(self, "_sum", value)


class SparseConditionalAccumulator(Conditional[SparseGradient]):
    """An accumulator that sums sparse gradients, rows by id, until as many have arrived as a taker requires.

    Parameters
    ----------
    dtype : {"float16", "float32", "float64"} or dtype
        Gradients are summed in it, in arrival order.
    shape : sequence of int or None
        Shape of the dense tensor that the rows belong to; None, or dims of -1, where unknown.
    reduction : {"MEAN", "SUM"}
        "MEAN" divides each row by the number of gradients that contained its id, "SUM" does not.
    tf_compat : bool
        Merge as TensorFlow does, bit for bit, even if ids are not ascending and distinct; slow.

    Raises
    ------
    UsageError
        If an argument is invalid.

    References
    ----------
    ``tf.compat.v1.SparseConditionalAccumulator``

    Examples
    --------
    >>> import penstock as ps
    >>> accumulator = ps.SparseConditionalAccumulator(shape=(100, 2))
    >>> accumulator.apply_gradient([7, 3], [[1.0, 2.0], [4.0, 4.0]])
    True
    >>> accumulator.apply_gradient([7], [[3.0, 6.0]])
    True
    >>> gradient = accumulator.take_gradient(num_required=2)
    >>> gradient.indices, gradient.values
    (array([3, 7]), array([[4., 4.],
           [2., 4.]], dtype=float32))
    """

    def __init__(
        self, dtype: Any = "float32", shape: Any = None, reduction: str = "MEAN", tf_compat: bool = False
    ) -> None:
        super().__init__(dtype, shape, reduction)
        self.tf_compat = tf_compat
        self._row: tuple[int, ...] = ()  # the shape of a row; valid only while gradients are accumulated
        self._sums = sparse_sums(self.dtype, 1, tf_compat)

    def apply_gradient(
        self,
        ids: Any,
        values: Any,
        local_step: int = 0,
        grad_shape: Any = None,
        contributor: Contributor = None,
    ) -> bool:
        """Add one gradient.

        Parameters
        ----------
        ids : array_like of int, shape (n,)
            In any order, repeats allowed: every row of an id is summed, the id counts once.
        values : array_like
            Of the accumulator's dtype, shape (n, ...), or nested numbers.
        local_step : int
            The step that the gradient was computed at; if it is behind the global step, the gradient is stale.
        grad_shape : sequence of int or None
            The gradient's dense shape, checked against the declared one.
        contributor : str, int or None
            The sender, for ``explain`` and ``stale``.

        Returns
        -------
        bool
            False for a stale gradient: it is dropped whatever its shapes, and counted.

        Raises
        ------
        InputError
            For wrong shapes, ids or dtype, and for finite values with which a sum becomes infinite (not with
            ``tf_compat``); nothing is added then.
        UsageError
            For a wrong ``local_step`` or ``contributor``.
        CancelledError
            After ``close``.

        References
        ----------
        TensorFlow's ``SparseAccumulatorApplyGradient``

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.SparseConditionalAccumulator(shape=(100, 2))
        >>> accumulator.apply_gradient([7, 7], [[1.0, 2.0], [3.0, 6.0]])
        True
        >>> accumulator.take_gradient(1).values
        array([[4., 8.]], dtype=float32)
        """
        step, who = whole("local_step", local_step), contributor_of(contributor)
        rows, index = values_of(values, self.dtype), ids_of(ids)
        shape = sizes_of(grad_shape)
        # Check outside the gate's lock; raise only if the gradient is not stale.
        judged = sparse_problem(index, rows, self.shape, shape)

        def add() -> None:
            num = self._gate.num_accumulated
            problem = judged or sparse_row_problem(rows, self.shape, self._row if num else None)
            if problem is not None:
                raise InputError(problem)
            self._add(index, rows, num)

        return self._gate.admit(step, add, who)

    def _add(self, ids: npt.NDArray[np.int64], rows: Array, num: int) -> None:
        width = math.prod(rows.shape[1:])
        if not num:
            if width != self._sums.width:
                self._sums = sparse_sums(self.dtype, width, self.tf_compat)
            self._row = rows.shape[1:]
        self._sums.add(ids, np.ascontiguousarray(rows).reshape(len(ids), width), num)

    def _produce(self, num: int) -> SparseGradient:
        ids, values = self._sums.take(self._mean)
        first = self.shape[0] if self.shape else None
        dense_shape = np.array([-1 if first is None else first, *self._row], np.int64)
        return SparseGradient(ids, values.reshape(len(ids), *self._row), dense_shape)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "tf_compat": self.tf_compat}

    def _sum_state(self) -> dict[str, Any]:
        if not self.num_accumulated():
            return {}
        state = self._sums.get_state()
        return {**state, "values": state["values"].reshape(len(state["ids"]), *self._row)}

    def _checked(self, num: int, state: dict[str, Any]) -> Callable[[], None]:
        row: tuple[int, ...] = ()
        if num:
            ids, values = ids_of(state["ids"]), values_of(state["values"], self.dtype)
            problem = sparse_problem(ids, values, self.shape, None)
            problem = problem or sparse_row_problem(values, self.shape, None)
            if problem is not None or np.shape(state["counts"]) != ids.shape:
                raise StateError(problem or f"counts: expected shape {ids.shape}, got {np.shape(state['counts'])}")
            row = values.shape[1:]
        sums = sparse_sums(self.dtype, math.prod(row), self.tf_compat)
        if num:
            flat = np.ascontiguousarray(values).reshape(len(ids), sums.width)
            sums.set_state({"ids": ids, "values": flat, "counts": np.asarray(state["counts"], np.int64)})

        def put() -> None:
            self._sums, self._row = sums, row

        return put
