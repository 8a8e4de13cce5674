"""The Adagrad family, whose steps are scaled by accumulators of squared gradients.

TensorFlow has classes for the first two; the rest are named like the proto's fields, and two have no public formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

from penstock.model.updates.optimizer_class import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    Range,
    SlotFunction,
    global_step,
    optimizer_class,
    ranges,
)
from penstock.model.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, mix, root, shrink, square

__all__ = [
    "Adagrad",
    "AdagradMomentum",
    "BoundedAdagrad",
    "FrequencyAwareAdagrad",
    "MDLAdagradLight",
    "ProximalAdagrad",
    "RowWiseAdagrad",
    "TorchAdagrad",
]


@optimizer_class
class Adagrad(Optimizer):
    """Adagrad: divide each element's step by the root of the sum of its squared gradients.

    Parameters
    ----------
    initial_accumulator_value : float
        Initial value of the slot; above 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``a' = a + g²; w' = w - lr*g/sqrt(a')``. Slot: accumulators (a). There is no epsilon, so the slot must start above
    0.

    References
    ----------
    ``tf.tpu.experimental.embedding.Adagrad``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.Adagrad(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.91548455, 1.098773  ]], dtype=float32)
    """

    parameters_field = "adagrad"
    zero_is_no_op = True
    slot_names = ("accumulators",)
    first_slot_argument = "initial_accumulator_value"
    limits = ranges(initial_accumulator_value=POSITIVE)

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    low_dimensional_packing_status: bool | int = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # There is no epsilon: the accumulator must start above 0.
        # Source: sparse_core_ops_utils.cc; ResourceSparseApplyAdagrad (update_slots=true) on the CPU.
        (a,) = slots
        a = a + square(ops, g)
        return w - lr * g / root(ops, a), (a,)


@optimizer_class
class AdagradMomentum(Optimizer):
    """Adagrad with momentum, and with any exponent in place of the square root.

    Parameters
    ----------
    momentum : float
        Decay of the accumulated steps; lint recommends at least 0 and below 1.
    use_nesterov : bool
        Step by ``lr*(momentum*m' + s)`` instead of ``lr*m'``.
    exponent : float
        The accumulator enters as ``a'^(-1/exponent)``; above 0. 2 is Adagrad's square root.
    beta2 : float
        Decay of the accumulator; 1 accumulates without decay, as Adagrad does.
    epsilon : float
        Added to the accumulator; above 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``s = g*(a' + epsilon)^(-1/exponent); m' = momentum*m + s; w' = w - lr*m'``. ``a' = a + g²`` where beta2 is 1, else
    ``beta2*a + (1-beta2)*g²``. Slots, from 0: accumulators (a), momenta (m).

    References
    ----------
    ``tf.tpu.experimental.embedding.AdagradMomentum``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.AdagradMomentum(0.1, momentum=0.9), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.7392893, 1.2607107]], dtype=float32)
    """

    parameters_field = "adagrad_momentum"
    doubt = "the proto's comment and TensorFlow's source differ; the source is followed"
    slot_names = ("accumulators", "momenta")
    limits = ranges(epsilon=POSITIVE, exponent=POSITIVE)
    advised = ranges(momentum=SHARE, beta2=Range(0, math.nextafter(1, 2), False, "at least 0 and at most 1"))

    learning_rate: LearningRate = 0.001
    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2
    beta2: float = 1
    epsilon: float = 1e-10
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    low_dimensional_packing_status: bool | int = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # An exponent of 2 is a square root, others need pow. Source: sparse_core_ops_utils.cc, both versions. Doubt:
        # the proto's comment accumulates the factor without g in m and multiplies by g at the end.
        a, m = slots
        momentum, exponent, beta2, epsilon = rule.numbers(w, "momentum", "exponent", "beta2", "epsilon")
        a = a + square(ops, g) if beta2 == 1 else mix(ops, beta2, a, square(ops, g))
        if exponent == 2:
            s = g / root(ops, a + epsilon)
        else:
            s = ops.rounded(g * ops.rounded(ops.xp.power(a + epsilon, w.dtype.type(-1) / exponent)))
        m = ops.rounded(momentum * m) + s
        step = ops.rounded(momentum * m) + s if rule.flag("use_nesterov") else m
        return w - ops.rounded(lr * step), (a, m)


@dataclass(eq=False, repr=False)
class _Accumulating(KeywordOptimizer):
    """The arguments and the slot that TensorFlow's messages of the family have in common."""

    slot_names: ClassVar[tuple[str, ...]] = ("accumulators",)
    first_slot_argument = "initial_accumulator_value"

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1


@optimizer_class
class RowWiseAdagrad(_Accumulating):
    """Adagrad with one accumulator per row: a fraction ``1/dim`` of Adagrad's slot memory.

    Parameters
    ----------
    initial_accumulator_value : float
        Initial value of the slot; above 0, or with an epsilon at least 0.
    epsilon : float
        Added to the root of the accumulator, at least 0. FBGEMM's is 1e-8, with accumulators that start at 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``a' = a + mean(g²) over the row; w' = w - lr*g/(sqrt(a') + epsilon)``. Slot: accumulators (a), shape
    (vocabulary_size, 1).

    This is a penstock extension. TensorFlow's message has no member for it, so ``EmbeddingConfig.to_proto`` raises
    ConfigError; an EngineConfig holds it. Defaults: Adagrad's.

    References
    ----------
    FBGEMM's ``EXACT_ROWWISE_ADAGRAD``, which most production systems train embeddings with.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.RowWiseAdagrad(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9664799, 1.1340803]], dtype=float32)
    """

    parameters_field = "row_wise_adagrad"
    zero_is_no_op = True
    limits = ranges(initial_accumulator_value=NOT_NEGATIVE, epsilon=NOT_NEGATIVE)

    epsilon: float = 0.0

    def __post_init__(self, clipvalue: Clip) -> None:
        super().__post_init__(clipvalue)
        if (allowed := self.first_slot_range(self.proto_values())) is not None:
            allowed.check("initial_accumulator_value", self.initial_accumulator_value)

    @classmethod
    def first_slot_range(cls, hyper_parameters: Mapping[str, Any]) -> Range | None:
        return NOT_NEGATIVE if hyper_parameters.get("epsilon") else POSITIVE

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: FBGEMM's EXACT_ROWWISE_ADAGRAD.
        (a,) = slots
        epsilon = rule.number(w, "epsilon")
        a = a + ops.row_mean(square(ops, g))
        # XLA multiplies by the inverse of a divisor that is a broadcast. This one depends on g where g is NaN.
        divisor = root(ops, ops.xp.where(ops.xp.isnan(g), g, a))
        return w - lr * g / (ops.rounded(divisor + epsilon) if epsilon else divisor), (a,)


@optimizer_class
class TorchAdagrad(KeywordOptimizer):
    """Adagrad as torch computes it: with an epsilon, and accumulators that start at 0.

    Parameters
    ----------
    lr_decay : float
        Decay of the rate over steps, at least 0: step t, from 1, has the rate ``lr/(1 + (t-1)*lr_decay)``.
    epsilon : float
        Added to the root of the sum; above 0.
    initial_accumulator_value : float
        Initial value of the slot, at least 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``s' = s + g²; w' = w - lr*g/(sqrt(s') + epsilon)``. Slot: sum (s). Only rows with a gradient change, as with sparse
    gradients in torch; the others' gradient is 0 there, which changes nothing. t is the engine's step + 1.

    TensorFlow's message has no member for it: an EngineConfig holds it. Defaults: torch's.

    References
    ----------
    ``torch.optim.Adagrad``; FBGEMM's ``EXACT_ADAGRAD``, with an epsilon of 1e-8

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.TorchAdagrad(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, 0.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.9, 1. ]], dtype=float32)
    """

    parameters_field = "torch_adagrad"
    zero_is_no_op = True
    slot_names = ("sum",)
    first_slot_argument = "initial_accumulator_value"
    limits = ranges(lr_decay=NOT_NEGATIVE, epsilon=POSITIVE, initial_accumulator_value=NOT_NEGATIVE)

    learning_rate: LearningRate = 0.01
    lr_decay: float = 0.0
    epsilon: float = 1e-10
    initial_accumulator_value: float = 0.0

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: _single_tensor_adagrad of torch. lr_decay is in the rate (UpdateRule.rate_at).
        (s,) = slots
        s = s + square(ops, g)
        return w - lr * g / ops.rounded(root(ops, s) + rule.number(w, "epsilon")), (s,)


@optimizer_class
class BoundedAdagrad(_Accumulating):
    """Adagrad with an upper bound on each step and on the accumulator.

    Parameters
    ----------
    initial_accumulator_value : float
        Initial value of the slot; above 0.
    update_accumulator_first : bool
        Divide the step by the root of the new accumulator; False: of the previous one.
    max_var_update : float
        Largest step of an element, at least 0; 0: no limit.
    max_accumulator : float
        Largest value of the accumulator, at least 0; 0: no limit.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``a' = min(a + g², max_accumulator); w' = w - clamp(lr*g/sqrt(a'), ±max_var_update)``. Slot: accumulators (a). The
    defaults are penstock's and make it equal to Adagrad.

    References
    ----------
    The field comments of ``BoundedAdagradParameters`` in TensorFlow's ``optimization_parameters.proto``; no formula is
    public.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.BoundedAdagrad(0.1, max_var_update=0.05), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.95, 1.05]], dtype=float32)
    """

    parameters_field = "bounded_adagrad"
    zero_is_no_op = True
    doubt = "only comments on its fields are public"
    limits = ranges(initial_accumulator_value=POSITIVE, max_var_update=NOT_NEGATIVE, max_accumulator=NOT_NEGATIVE)

    update_accumulator_first: bool = True
    max_var_update: float = 0.0
    max_accumulator: float = 0.0

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: the proto's field comments only. Doubts: whether max_var_update bounds the step or the gradient (the
        # comment says gradient, the name says update of the variable: the step is bounded here), and whether the cap
        # comes before the division (it does here: a' is one value).
        (before,) = slots
        max_update, max_accumulator = rule.numbers(w, "max_var_update", "max_accumulator")
        a = before + square(ops, g)
        if max_accumulator > 0:
            a = clip(ops, a, None, max_accumulator)
        step = lr * g / root(ops, a if rule.flag("update_accumulator_first") else before)
        if max_update > 0:
            step = clip(ops, step, -max_update, max_update)
        return w - step, (a,)


@optimizer_class
class ProximalAdagrad(_Accumulating):
    """Adagrad with a proximal step for l1 and l2 regularization.

    Parameters
    ----------
    initial_accumulator_value : float
        Initial value of the slot; above 0.
    l1 : float
        Strength of l1 regularization, at least 0; it sets small weights to exactly 0.
    l2 : float
        Strength of l2 regularization, at least 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``a' = a + g²; e = lr/sqrt(a'); p = w - e*g; w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Slot: accumulators (a).
    Defaults: those of tf.compat.v1.train.ProximalAdagradOptimizer, and Adagrad's learning rate.

    References
    ----------
    ``ProximalAdagradParameters`` in TensorFlow's ``optimization_parameters.proto``, which names the CPU kernel.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.ProximalAdagrad(0.1, l1=0.5), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.8309691, 1.0740798]], dtype=float32)
    """

    parameters_field = "proximal_adagrad"
    limits = ranges(initial_accumulator_value=POSITIVE, l1=NOT_NEGATIVE, l2=NOT_NEGATIVE)

    l1: float = 0.0
    l2: float = 0.0

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: the proto names the CPU kernel (ResourceSparseApplyProximalAdagrad).
        (a,) = slots
        a = a + square(ops, g)
        rate = ops.rounded(lr / root(ops, a))
        return shrink(ops, rule, rate, w - ops.rounded(rate * g)), (a,)


@optimizer_class
class MDLAdagradLight(_Accumulating):
    """MDL Adagrad light, which can be loaded and saved, but not run: its formula is not public.

    Parameters
    ----------
    initial_accumulator_value : float
        Initial value of the slot ``accumulators``.
    l2, lr_power, min_servable_mdl_benefit, mdl_mix_in_margin, mdl_benefit_rampup_coeff : float
        Fields of the message, kept as they are.
    mdl_min_weight, benefit_revisit_scale, max_event_benefit, max_total_benefit, mdl_hard_limit : float
        Fields of the message, kept as they are.
    hard_limit_min_benefit, mdl_regularize : bool
        Fields of the message, kept as they are.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    Slots: accumulators, weights, benefits.

    References
    ----------
    ``MdlAdagradLightParameters`` in TensorFlow's ``optimization_parameters.proto``, also of the defaults (0).

    Examples
    --------
    >>> import penstock as ps
    >>> ps.MDLAdagradLight(0.1).has_formula()
    False
    """

    parameters_field = "mdl_adagrad_light"
    slot_names = ("accumulators", "weights", "benefits")

    l2: float = 0.0
    lr_power: float = 0.0
    min_servable_mdl_benefit: float = 0.0
    mdl_mix_in_margin: float = 0.0
    mdl_benefit_rampup_coeff: float = 0.0
    mdl_min_weight: float = 0.0
    benefit_revisit_scale: float = 0.0
    max_event_benefit: float = 0.0
    max_total_benefit: float = 0.0
    mdl_hard_limit: float = 0.0
    hard_limit_min_benefit: bool = False
    mdl_regularize: bool = False


@optimizer_class
class FrequencyAwareAdagrad(KeywordOptimizer):
    """Frequency-aware Adagrad, which can be loaded and saved, but not run.

    Parameters
    ----------
    l1_regularization_strength, l2_regularization_strength, max_lr_multiplier : float
        Fields of the message, kept as they are.
    probability_exponent, accumulator_decay, initial_accumulator_value : float
        Fields of the message, kept as they are.
    step_counter : float, callable, DynamicLearningRate or None
        A dynamic input like a dynamic learning rate, which shares the numbering of tags; by default the engine's step.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    The only public text on its formula contradicts itself. Slots, from 0: accumulators, counters.

    References
    ----------
    ``FrequencyAwareAdagradParameters`` in TensorFlow's ``optimization_parameters.proto``, also of the defaults (0).

    Examples
    --------
    >>> import penstock as ps
    >>> ps.FrequencyAwareAdagrad(0.1).slots()
    (('accumulators', 0.0), ('counters', 0.0))
    """

    parameters_field = "frequency_aware_adagrad"
    slot_names = ("accumulators", "counters")

    learning_rate: LearningRate = 0.001
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    max_lr_multiplier: float = 0.0
    probability_exponent: float = 0.0
    accumulator_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    step_counter: LearningRate | None = global_step
