"""Optimizers with moving averages of gradients: Momentum, RMSProp, centered RMSProp, Adadelta, Adam, partially row-wise
Adam, and Lion.

TensorFlow has a class for Adam; the others' arguments are named like the proto's fields. Adam and Lion are lazy (a step
updates only the rows that it touches) or non-lazy. Arguments and their proto fields only; penstock.updates has the
equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import ClassVar

from penstock.model.updates.optimizer_class import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    SlotFunction,
    optimizer_class,
    ranges,
)
from penstock.model.updates.rule import Array, Ops, Result, Slots, UpdateRule, mix, root, sign, square

__all__ = ["Adadelta", "Adam", "CenteredRMSProp", "Lion", "Momentum", "PartialRowWiseAdam", "RMSProp"]


@optimizer_class
class Momentum(KeywordOptimizer):
    """Stochastic gradient descent with momentum.

    Parameters
    ----------
    momentum : float
        Decay of the accumulated gradients; lint recommends at least 0 and below 1.
    use_nesterov : bool
        Step by ``lr*(g + momentum*m')`` instead of ``lr*m'``.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``m' = momentum*m + g; w' = w - lr*m'``. Slot: momenta (m), from 0. Defaults: SGD's learning rate and the customary
    0.9.

    References
    ----------
    ``MomentumParameters`` in TensorFlow's ``optimization_parameters.proto``, which names the CPU kernel.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Momentum(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.855, 1.58 ]], dtype=float32)
    """

    parameters_field = "momentum"
    slot_names = ("momenta",)
    advised = ranges(momentum=SHARE)

    learning_rate: LearningRate = 0.01
    momentum: float = 0.9
    use_nesterov: bool = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: ResourceSparseApplyMomentum.
        (m,) = slots
        decay = rule.number(w, "momentum")
        m = ops.rounded(decay * m) + g
        step = g + ops.rounded(decay * m) if rule.flag("use_nesterov") else m
        return w - ops.rounded(lr * step), (m,)


@dataclass(eq=False, repr=False)
class _MeanSquares(KeywordOptimizer):
    """The arguments of both forms of RMSProp."""

    first_slot_argument = "initial_ms_value"
    limits = ranges(rho=SHARE, epsilon=POSITIVE, initial_ms_value=NOT_NEGATIVE)
    advised = ranges(momentum=SHARE)

    learning_rate: LearningRate = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    initial_ms_value: float = 1.0


@optimizer_class
class RMSProp(_MeanSquares):
    """RMSProp: divide each step by the root of a moving average of squared gradients.

    Parameters
    ----------
    rho : float
        Decay of the moving average, at least 0 and below 1.
    momentum : float
        Decay of the accumulated steps; lint recommends at least 0 and below 1.
    epsilon : float
        Added to the average below the root; above 0.
    initial_ms_value : float
        Initial value of the slot ``ms``, at least 0; 1 as in TensorFlow 1.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``ms' = rho*ms + (1-rho)*g²; mom' = momentum*mom + lr*g/sqrt(ms' + epsilon); w' = w - mom'``. Slots: ms (from 1),
    mom (from 0). Defaults: tf.keras.optimizers.RMSprop's.

    References
    ----------
    ``RmsPropParameters`` in TensorFlow's ``optimization_parameters.proto``, which names the CPU kernel.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.RMSProp(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9480125, 1.1754116]], dtype=float32)
    """

    parameters_field = "rms_prop"
    slot_names = ("ms", "mom")

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: ResourceSparseApplyRMSProp.
        ms, mom = slots
        rho, decay, epsilon = rule.numbers(w, "rho", "momentum", "epsilon")
        ms = mix(ops, rho, ms, square(ops, g))
        mom = ops.rounded(decay * mom) + ops.rounded(lr * g) / root(ops, ms + epsilon)
        return w - mom, (ms, mom)


@optimizer_class
class CenteredRMSProp(_MeanSquares):
    """RMSProp that divides by an estimate of the gradient's standard deviation.

    Parameters
    ----------
    rho : float
        Decay of the moving averages, at least 0 and below 1.
    momentum : float
        Decay of the accumulated steps; lint recommends at least 0 and below 1.
    epsilon : float
        Added to the variance below the root; above 0.
    initial_ms_value : float
        Initial value of the slot ``ms``, at least 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    The divisor is ``sqrt(ms' - mg'² + epsilon)``, with ``mg' = rho*mg + (1-rho)*g``; all else as in RMSProp. Slots: ms
    (from 1), mom, mg (from 0). Defaults: RMSProp's.

    References
    ----------
    ``CenteredRmsPropParameters`` in TensorFlow's ``optimization_parameters.proto``, which names the CPU kernel.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.CenteredRMSProp(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9479421, 1.1781741]], dtype=float32)
    """

    parameters_field = "centered_rms_prop"
    slot_names = ("ms", "mom", "mg")

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: ResourceSparseApplyCenteredRMSProp. If rounding leaves nothing positive under the root, where that
        # kernel returns NaN, epsilon alone is the divisor.
        ms, mom, mg = slots
        rho, decay, epsilon = rule.numbers(w, "rho", "momentum", "epsilon")
        ms = mix(ops, rho, ms, square(ops, g))
        mg = mix(ops, rho, mg, g)
        deviation = (ms - square(ops, mg)) + epsilon
        deviation = ops.xp.where(deviation > 0, deviation, epsilon)
        mom = ops.rounded(decay * mom) + ops.rounded(lr * g) / root(ops, deviation)
        return w - mom, (ms, mom, mg)


@optimizer_class
class Adadelta(KeywordOptimizer):
    """Adadelta: scale each gradient by the ratio of recent updates to recent gradients.

    Parameters
    ----------
    rho : float
        Decay of both moving averages, at least 0 and below 1.
    epsilon : float
        Added to both averages below their roots; above 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``a' = rho*a + (1-rho)*g²; u = g*sqrt(d + epsilon)/sqrt(a' + epsilon); d' = rho*d + (1-rho)*u²; w' = w - lr*u``.
    Slots, from 0: accumulators (a), updates (d). Defaults: tf.keras.optimizers.Adadelta's.

    References
    ----------
    ``AdadeltaParameters`` in TensorFlow's ``optimization_parameters.proto``, which names the CPU kernel.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adadelta(1.0), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9985858, 1.0014142]], dtype=float32)
    """

    parameters_field = "adadelta"
    slot_names = ("accumulators", "updates")
    limits = ranges(rho=SHARE, epsilon=POSITIVE)

    learning_rate: LearningRate = 0.001
    rho: float = 0.95
    epsilon: float = 1e-7

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: ResourceSparseApplyAdadelta.
        a, d = slots
        rho, epsilon = rule.numbers(w, "rho", "epsilon")
        a = mix(ops, rho, a, square(ops, g))
        u = ops.rounded(ops.rounded(g * root(ops, d + epsilon)) / root(ops, a + epsilon))
        return w - ops.rounded(lr * u), (a, mix(ops, rho, d, square(ops, u)))


@optimizer_class
class Adam(Optimizer):
    """Adam without bias correction, lazy by default.

    Parameters
    ----------
    beta_1, beta_2 : float
        Decays of the first and the second moment, each at least 0 and below 1.
    epsilon : float
        Above 0; added to the divisor, or its square below the root.
    lazy_adam : bool
        Update only the rows that a step touches; False updates every row in every step.
    sum_inside_sqrt : bool
        Divide by ``sqrt(v' + epsilon²)``; False: by ``sqrt(v') + epsilon``.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``m' = beta_1*m + (1-beta_1)*g; v' = beta_2*v + (1-beta_2)*g²; w' = w - lr*m'/sqrt(v' + epsilon²)``. Slots, from 0:
    momenta (m), velocities (v). Include a bias correction in the learning rate, with a schedule.

    References
    ----------
    ``tf.tpu.experimental.embedding.Adam``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adam(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.6837701, 1.3162298]], dtype=float32)
    """

    parameters_field = "adam"
    slot_names = ("momenta", "velocities")
    attribute_of: ClassVar[Mapping[str, str]] = {
        "beta1": "beta_1",
        "beta2": "beta_2",
        "use_sum_inside_sqrt": "sum_inside_sqrt",
    }
    not_in_equation = frozenset({"use_non_lazy_adam"})
    non_lazy_field, non_lazy_argument = "use_non_lazy_adam", "lazy_adam=False"
    limits = ranges(beta_1=SHARE, beta_2=SHARE, epsilon=POSITIVE)

    learning_rate: LearningRate = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-07
    lazy_adam: bool = True
    sum_inside_sqrt: bool = True
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    low_dimensional_packing_status: bool | int = False

    @property
    def use_non_lazy_adam(self) -> bool:
        """The proto's field, which negates the argument."""
        return not self.lazy_adam

    @use_non_lazy_adam.setter
    def use_non_lazy_adam(self, value: bool) -> None:
        self.lazy_adam = not value

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: sparse_core_ops_utils.cc; ResourceApplyAdam on the CPU with beta powers of 0 and epsilon outside.
        m, v = slots
        beta1, beta2, epsilon = rule.numbers(w, "beta1", "beta2", "epsilon")
        m = mix(ops, beta1, m, g)
        v = mix(ops, beta2, v, square(ops, g))
        if rule.flag("use_sum_inside_sqrt"):
            divisor = root(ops, v + epsilon * epsilon)
        else:
            divisor = ops.rounded(root(ops, v) + epsilon)
        return w - ops.rounded(lr * m) / divisor, (m, v)


@optimizer_class
class PartialRowWiseAdam(KeywordOptimizer):
    """Adam with one second moment per row, and bias correction: half of Adam's slot memory.

    Parameters
    ----------
    beta1, beta2 : float
        Decays of the first and the second moment, each at least 0 and below 1.
    epsilon : float
        Added to the corrected root of the second moment; above 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``m' = beta1*m + (1-beta1)*g; v' = beta2*v + (1-beta2)*mean(g²) over the row;
    w' = w - lr*(m'/(1-beta1^t))/(sqrt(v'/(1-beta2^t)) + epsilon)``, where t is the engine's step + 1, for all rows. A
    step updates only the rows that it touches. Slots, from 0: exp_avg (m), and exp_avg_sq (v), shape
    (vocabulary_size, 1). FBGEMM's ``weight_decay`` is ``weight_decay_factor`` with
    ``multiply_weight_decay_factor_by_learning_rate``.

    TensorFlow's message has no member for it: an EngineConfig holds it. Defaults: torchrec's.

    References
    ----------
    FBGEMM's ``PARTIAL_ROWWISE_ADAM``; ``torchrec.optim.PartialRowWiseAdam``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.PartialRowWiseAdam(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -0.5]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9, 1.1]], dtype=float32)
    """

    parameters_field = "partial_row_wise_adam"
    slot_names = ("exp_avg", "exp_avg_sq")
    limits = ranges(beta1=SHARE, beta2=SHARE, epsilon=POSITIVE)

    learning_rate: LearningRate = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: FBGEMM's PARTIAL_ROWWISE_ADAM, with its divisions by 1 - beta^t as factors (UpdateRule.rate_at).
        m, v = slots
        beta1, beta2, epsilon = rule.numbers(w, "beta1", "beta2", "epsilon")
        rate, of_mean, of_root = lr[0], lr[1], lr[2]
        m = mix(ops, beta1, m, g)
        v = mix(ops, beta2, v, ops.row_mean(square(ops, g)))
        wide = ops.xp.where(ops.xp.isnan(g), g, v)  # as in RowWiseAdagrad
        divisor = ops.rounded(ops.rounded(root(ops, wide) * of_root) + epsilon)
        return w - ops.rounded(rate * ops.rounded(m * of_mean)) / divisor, (m, v)


@optimizer_class
class Lion(KeywordOptimizer):
    """Lion: step by the sign of an interpolation of momentum and gradient.

    Parameters
    ----------
    beta1 : float
        Weight of the momentum in the step, at least 0 and below 1.
    beta2 : float
        Decay of the momentum, at least 0 and below 1.
    use_non_lazy_lion : bool
        Update every row in every step; False updates only the rows that a step touches.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``u = beta1*m + (1-beta1)*g; w' = w - lr*sign(u); m' = beta2*m + (1-beta2)*g``. Slot: momenta (m), from 0. Defaults:
    those of Chen et al., 2023 (0.9, 0.99, a rate of 1e-4).

    References
    ----------
    ``LionParameters`` in TensorFlow's ``optimization_parameters.proto``; Chen et al., "Symbolic Discovery of
    Optimization Algorithms", 2023.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Lion(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9, 1.1]], dtype=float32)
    """

    parameters_field = "lion"
    slot_names = ("momenta",)
    not_in_equation = frozenset({"use_non_lazy_lion"})
    non_lazy_field, non_lazy_argument = "use_non_lazy_lion", "use_non_lazy_lion=True"
    limits = ranges(beta1=SHARE, beta2=SHARE)

    learning_rate: LearningRate = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    use_non_lazy_lion: bool = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # sign(0) = 0. Source: the newest proto's comment, which names Keras' Lion.
        (m,) = slots
        beta1, beta2 = rule.numbers(w, "beta1", "beta2")
        step = sign(ops, mix(ops, beta1, m, g))
        return w - ops.rounded(lr * step), (mix(ops, beta2, m, g),)
