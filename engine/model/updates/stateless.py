"""Optimizers without statistics of gradients: SGD, assignment, the frequency estimator, and user-defined programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.updates.optimizer_class import (
    NOT_NEGATIVE,
    OPEN_SHARE,
    POSITIVE,
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    global_step,
    optimizer_class,
    ranges,
)
from penstock.model.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, mix

__all__ = ["SGD", "Assign", "FrequencyEstimator", "UserDefinedProgram"]


@optimizer_class
class SGD(Optimizer):
    """Stochastic gradient descent.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``w' = w - lr*g``. No slots.

    References
    ----------
    ``tf.tpu.experimental.embedding.SGD``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.95, 1.2 ]], dtype=float32)
    """

    parameters_field = "stochastic_gradient_descent"
    zero_is_no_op = True

    learning_rate: LearningRate = 0.01
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    clipvalue: InitVar[Clip] = None
    low_dimensional_packing_status: bool | int = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: sparse_core_ops_utils.cc; ResourceScatterSub on the CPU.
        return w - ops.rounded(lr * g), slots


@optimizer_class
class Assign(KeywordOptimizer):
    """Assignment: the gradient becomes the row.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``w' = g``, where g is the sum of the gradients of an id, or their mean. No slots; the learning rate is not used.

    References
    ----------
    ``AssignParameters`` in TensorFlow's ``optimization_parameters.proto``, which has no class for it.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Assign(), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[ 0.5, -2. ]], dtype=float32)
    """

    parameters_field = "assign"
    scaled_by_rate = False

    learning_rate: LearningRate = 1.0

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # An id that occurs twice gets the sum (or the mean).
        return g, slots


@optimizer_class
class FrequencyEstimator(KeywordOptimizer):
    """An estimate of the average number of steps between two hits of a row, which is the row.

    Parameters
    ----------
    learning_rate : DynamicLearningRate or callable
        The step, so it must be dynamic; by default the engine's step number.
    tau : float
        Weight of the newest distance in the average, above 0 and below 1.
    max_delta : float
        Longest distance that counts, in steps; above 0. A table without an initializer starts there.
    outlier_threshold : float
        A distance of so many averages replaces the average; lint recommends at least 0.
    weight_exponent : float
        Exponent of the weight ``(D/max_delta)**weight_exponent`` that readers compute; not part of the update.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``d = step - last; c = min(d, max_delta); D' = c if d >= outlier_threshold*D else (1-tau)*D + tau*c``. Slot:
    last_hit_step, from 0. Intended for tables of dim 1; the gradient is ignored. The defaults are penstock's: tau as in
    Yi et al.; an outlier is at least ten averages long; weight_exponent 1 leaves ``D/max_delta`` unchanged.

    References
    ----------
    ``FrequencyEstimatorParameters`` in TensorFlow's ``optimization_parameters.proto``; Yi et al., RecSys 2019.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 1, optimizer=ps.FrequencyEstimator(tau=0.5, max_delta=8.0), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> for id in (5, 3, 5, 3, 5):
    ...     _ = engine.apply({"user": ([id], [[0.0]])})
    >>> engine.lookup("user", [5])
    array([[2.5]], dtype=float32)
    """

    parameters_field = "frequency_estimator"
    scaled_by_rate = False
    slot_names = ("last_hit_step",)
    not_in_equation = frozenset({"weight_exponent"})
    limits = ranges(max_delta=POSITIVE, tau=OPEN_SHARE)
    advised = ranges(outlier_threshold=NOT_NEGATIVE)

    learning_rate: LearningRate = global_step
    tau: float = 0.01
    max_delta: float = 1000.0
    outlier_threshold: float = 10.0
    weight_exponent: float = 1.0

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # The step arrives as the learning rate, exact up to 2**24. Doubt: the weight read-out
        # (D/max_delta)**weight_exponent is left to the reader; it is not part of the update.
        (last,) = slots
        tau, max_delta, threshold = rule.numbers(w, "tau", "max_delta", "outlier_threshold")
        distance = lr - last
        capped = clip(ops, distance, None, max_delta)
        outlier = distance >= ops.rounded(threshold * w)
        # tau*c + (1-tau)*D: mix takes the weight of D.
        mean = mix(ops, tau, capped, w)
        return ops.xp.where(outlier, capped, mean), (ops.xp.zeros_like(last) + lr,)


@optimizer_class
class UserDefinedProgram(KeywordOptimizer):
    """A Python function as optimizer: ``(w', *slots') = program(g, w, *slots)``, traced by JAX.

    Parameters
    ----------
    program : callable
        Takes the gradient, the weights and every slot, all float32 of one shape, and must work elementwise. Returns the
        new weights and the new slots as a tuple (weights alone may be bare). It does not receive the learning rate.
    initial_slot_values : sequence of float
        One per slot, at most 6; the slots are called Slot_0, Slot_1, …, as in TensorFlow.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    No file holds a Python function: such a configuration cannot be saved or converted to a proto. The program of a
    loaded proto, in XLA's format, is kept and saved but cannot be run.

    References
    ----------
    ``UserDefinedProgramParameters`` in TensorFlow's ``optimization_parameters.proto``.

    Examples
    --------
    >>> import penstock as ps
    >>> program = ps.UserDefinedProgram(lambda g, w: w - 0.1 * g / (1 + abs(g)))
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), program, name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.96666664, 1.0666667 ]], dtype=float32)
    """

    parameters_field = "user_defined_program"
    scaled_by_rate = False

    program: Callable[..., Any]
    learning_rate: LearningRate = 0.01
    initial_slot_values: Sequence[float] = ()

    def __post_init__(self, clipvalue: Clip) -> None:
        super().__post_init__(clipvalue)
        if not callable(self.program):
            raise ConfigError(f"program must be a function (gradient, weights, *slots), got {self.program!r}")
        # A tuple, so that optimizers can be hashed.
        self.initial_slot_values = tuple(self.initial_slot_values)
        # Next to the slots there are the weights and, with accumulation, the accumulated gradient; 7 arrays at most.
        if len(self.initial_slot_values) > 6:
            raise ConfigError(f"a program has at most 6 slots, got {len(self.initial_slot_values)}")

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Return the slots: ``Slot_0``, ``Slot_1``, … with their initial values.

        Returns
        -------
        tuple of (str, float)
            Name and initial value of each slot.
        """
        return tuple((f"Slot_{index}", value) for index, value in enumerate(self.initial_slot_values))

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # A program without slots may return bare weights. Its rounding is unspecified: XLA may fuse its operations.
        assert rule.program is not None  # the configuration gives one
        returned = rule.program(g, w, *slots)
        new = returned if isinstance(returned, tuple | list) else (returned,)
        if len(new) != 1 + rule.num_slots:
            raise ValueError(f"program: expected {1 + rule.num_slots} results (weights, then slots), got {len(new)}")
        arrays = tuple(ops.xp.asarray(values, w.dtype) for values in new)
        for name, values in zip(("weights", *(f"slot {s}" for s in range(rule.num_slots))), arrays, strict=True):
            if values.shape != w.shape:
                raise ValueError(f"program: expected {name} of shape {w.shape}, got {values.shape}")
        return arrays[0], arrays[1:]
