"""The operations of the update equations: the array namespace, the constants of a rule, exact small helpers.

This module does not depend on an optimizer. Every function but ``float32`` takes numpy and jax.numpy arrays of
one float dtype.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Array = Any  # numpy.ndarray or jax.Array: the namespace is an argument
Slots = tuple[Array, ...]
Result = tuple[Array, Slots]
Hyper = tuple[tuple[str, float | bool], ...]
Rate = float | tuple[float, float, float]

# How many slots of a rule, its last ones, have one number per row.
ROW_SLOTS = {"row_wise_adagrad": 1, "partial_row_wise_adam": 1}
# Rules that correct the bias of their moments, by the number of the step.
CORRECTED = {"partial_row_wise_adam"}


@dataclass(frozen=True)
class Ops:
    """The operations that an equation uses.

    Parameters
    ----------
    xp : module
        numpy or jax.numpy.
    rounded : callable
        Rounds a product before it enters a sum, or a divisor. NumPy rounds it anyway; a compiler would fuse the product
        into the sum (FMA) or turn the division into a multiplication, and produce different bits on different machines.

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> rule = ps.updates.update_rule(ps.SGD(0.1))
    >>> one = np.float32([[1.0, 1.0]])
    >>> ps.updates.update(ps.updates.Ops(np), rule, np.float32(0.1), one, one, ())
    (array([[0.9, 0.9]], dtype=float32), ())
    """

    xp: ModuleType
    rounded: Callable[[Array], Array] = lambda x: x

    def row_mean(self, squares: Array) -> Array:
        """Return the mean over the last axis, which stays, rounded.

        Halves are added until one is left, an order that every backend keeps. An odd middle stays: a zero is added to
        it, which changes no square.

        Parameters
        ----------
        squares : array, shape (..., dim)
            Not negative.

        Returns
        -------
        array, shape (..., 1)
        """
        share = squares.dtype.type(1) / squares.dtype.type(squares.shape[-1])
        while (width := squares.shape[-1]) > 1:
            half, odd = width // 2, width % 2
            upper = squares[..., half + odd :]
            if odd:
                upper = self.xp.pad(upper, [(0, 0)] * (upper.ndim - 1) + [(0, 1)])
            squares = squares[..., : half + odd] + upper
        return self.rounded(squares * share)


@dataclass(frozen=True)
class UpdateRule:
    """The constants of an update of one table; hashable, so that tables can share programs.

    Parameters
    ----------
    algorithm : str
        The member of ``OptimizationParameters.parameters``, or of ``TableSettings.optimizer``.
    num_slots : int
        State arrays in addition to the weights, in TensorFlow's load/retrieve order; see ``row_slots``.
    hyper : tuple of (str, float or bool)
        The optimizer's parameters, by the names of its proto message; numbers are rounded to float32, as in the proto.
        Parameters that are not listed are 0 or False, as in the proto.
    gradient_min, gradient_max : float or None
        Clip of the coalesced gradient; None leaves that side open.
    weight_decay : float
        Factor d of ``w - d*w``, applied before the update; 0 is off.
    decay_times_learning_rate : bool
        d becomes ``weight_decay * lr``.
    weight_min, weight_max : float or None
        Clip of the updated weight; None leaves that side open.
    non_lazy : bool
        Each step updates every row, with a gradient of 0 for rows without one.
    program : callable or None
        Of user_defined_program: (gradient, weights, *slots) -> (weights, *slots).

    Examples
    --------
    >>> import penstock as ps
    >>> ps.updates.update_rule(ps.Momentum(0.1)).hyper
    (('momentum', 0.8999999761581421), ('use_nesterov', False))
    """

    algorithm: str
    num_slots: int
    hyper: Hyper = ()
    gradient_min: float | None = None
    gradient_max: float | None = None
    weight_decay: float = 0.0
    decay_times_learning_rate: bool = False
    weight_min: float | None = None
    weight_max: float | None = None
    non_lazy: bool = False
    program: Callable[..., Any] | None = None

    @property
    def row_slots(self) -> int:
        """How many slots, the last ones, have one number per row; the others have the shape of the weights."""
        return ROW_SLOTS.get(self.algorithm, 0)

    def slot_dim(self, dim: int, slot: int = 0) -> int:
        """Return the floats per row of a slot of a table.

        Parameters
        ----------
        dim : int
            Of the table.
        slot : int
            The number of the slot.

        Returns
        -------
        int
        """
        return dim if slot < self.num_slots - self.row_slots else 1

    @property
    def is_corrected(self) -> bool:
        """Whether an update takes three rates: the learning rate and the corrections of both moments' bias."""
        return self.algorithm in CORRECTED

    @property
    def counts_steps(self) -> bool:
        """Whether the rate of an update depends on the number of its step."""
        return self.is_corrected or bool(dict(self.hyper).get("lr_decay"))

    def rate_at(self, rate: float, step: int) -> Rate:
        """Return the rate that the update of a step takes.

        Parameters
        ----------
        rate : float
            The learning rate.
        step : int
            The number of the step, from 0; one below 0 counts as 0.

        Returns
        -------
        float or (float, float, float)
            With ``is_corrected``: the learning rate, and the factors of the first moment and of the root of the second.

        Examples
        --------
        >>> import penstock as ps
        >>> ps.updates.update_rule(ps.TorchAdagrad(0.5, lr_decay=0.25)).rate_at(0.5, 4)
        0.25
        """
        hyper, step = dict(self.hyper), max(step, 0)
        if not self.is_corrected:
            return rate / (1 + step * hyper.get("lr_decay", 0.0))
        first, second = (1 - _power(hyper[beta], step + 1) for beta in ("beta1", "beta2"))
        return rate, 1 / first, 1 / math.sqrt(second)

    def numbers(self, like: Array, *names: str) -> tuple[Any, ...]:
        """Return hyper-parameters as scalars of an array's dtype, so that expressions of them round as on the device.

        Parameters
        ----------
        like : array
            Whose dtype they get.
        *names : str
            The hyper-parameters.

        Returns
        -------
        tuple of scalar
        """
        hyper = dict(self.hyper)
        return tuple(like.dtype.type(hyper.get(name, 0.0)) for name in names)

    def number(self, like: Array, name: str) -> Any:
        """Return one hyper-parameter as a scalar of an array's dtype.

        Parameters
        ----------
        like : array
            Whose dtype it gets.
        name : str
            The hyper-parameter.

        Returns
        -------
        scalar
        """
        return self.numbers(like, name)[0]

    def flag(self, name: str) -> bool:
        """Return one hyper-parameter that is a switch.

        Parameters
        ----------
        name : str
            The hyper-parameter.

        Returns
        -------
        bool
        """
        return bool(dict(self.hyper).get(name, False))


def _power(base: float, exponent: int) -> float:
    """Return a power by multiplications alone, which all machines round alike; C libraries differ in ``pow``."""
    power = 1.0
    while exponent:
        power *= base if exponent & 1 else 1.0
        base, exponent = base * base, exponent >> 1
    return power


def clip(ops: Ops, values: Array, lower: Array | float | None, upper: Array | float | None) -> Array:
    """Return ``min(max(values, lower), upper)``, in that order: reversed limits give ``upper``.

    Parameters
    ----------
    ops : Ops
        The array namespace.
    values : array
        Of one float dtype.
    lower, upper : array, float or None
        None leaves that side open.

    Returns
    -------
    array

    Notes
    -----
    Uses comparisons, because backends differ in which of two zeros min and max return.

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> ps.updates.clip(ps.updates.Ops(np), np.float32([-2.0, 0.5, 3.0]), -1.0, None)
    array([-1. ,  0.5,  3. ], dtype=float32)
    """
    if lower is not None:
        lower = values.dtype.type(lower) if isinstance(lower, float) else lower
        values = ops.xp.where(values < lower, lower, values)
    if upper is not None:
        upper = values.dtype.type(upper) if isinstance(upper, float) else upper
        values = ops.xp.where(values > upper, upper, values)
    return values


def sign(ops: Ops, values: Array) -> Array:
    """Return -1, 0 or 1. xp.sign is not portable: NumPy's gives +0 for -0, XLA's gives -0."""
    unit = values.dtype.type(1)
    return ops.xp.where(values > 0, unit, ops.xp.where(values < 0, -unit, unit - unit))


def mix(ops: Ops, keep: Any, old: Array, new: Array) -> Array:
    """``keep*old + (1 - keep)*new``: a moving average. 1 - keep is computed in the dtype, as on the device."""
    share = old.dtype.type(1) - keep
    return ops.rounded(keep * old) + ops.rounded(share * new)


def square(ops: Ops, values: Array) -> Array:
    """Return values², rounded."""
    return ops.rounded(values * values)


def root(ops: Ops, values: Array) -> Array:
    """Return sqrt(values), rounded: a compiler would turn a division by it into a multiplication by rsqrt."""
    return ops.rounded(ops.xp.sqrt(values))


def inverse(ops: Ops, scalar: Array) -> Array:
    """Return 1/scalar, rounded, to multiply rows by: XLA turns a division by a scalar into that anyway."""
    return ops.rounded(scalar.dtype.type(1) / scalar)


def shrink(ops: Ops, rule: UpdateRule, rate: Array, p: Array) -> Array:
    """``sign(p)*max(|p| - rate*l1, 0)/(1 + rate*l2)``: the proximal step of l1 and l2, elementwise."""
    l1, l2 = rule.numbers(p, "l1", "l2")
    if l1:
        left = ops.xp.abs(p) - ops.rounded(rate * l1)
        p = sign(ops, p) * clip(ops, left, 0.0, None)
    return p / ops.rounded(1 + ops.rounded(rate * l2)) if l2 else p


def float32(value: float) -> float:
    """Return ``value`` rounded to float32, as a Python float; one too large becomes infinite, as in TensorFlow.

    A configuration built from Python floats must equal the same configuration after a round trip through a proto.
    """
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
