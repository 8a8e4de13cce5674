"""The Adagrad family, whose steps are scaled by accumulators of squared gradients.

TensorFlow has classes for the first two; the rest are named like the proto's fields, and two have no public formula.
Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

import math
from dataclasses import InitVar

from penstock.config.optimizers.optimizer_class import (
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


@optimizer_class
class Adagrad(Optimizer):
    """``a' = a + g²; w' = w - lr*g/sqrt(a')``. Slot: accumulators. Source: tf.tpu.experimental.embedding.Adagrad."""

    parameters_field = "adagrad"
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


@optimizer_class
class AdagradMomentum(Optimizer):
    """``s = g*(a' + epsilon)^(-1/exponent); m' = momentum*m + s; w' = w - lr*m'``. Slots from 0: accumulators, momenta.

    ``a' = a + g²`` where beta2 is 1, else ``beta2*a + (1-beta2)*g²``; with use_nesterov the step is
    ``lr*(momentum*m' + s)``. Source: tf.tpu.experimental.embedding.AdagradMomentum.
    """

    parameters_field = "adagrad_momentum"
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


@optimizer_class
class RowWiseAdagrad(KeywordOptimizer):
    """``a' = a + mean(g²) over the row; w' = w - lr*g/sqrt(a')``. Slot: accumulators, one per row.

    A penstock extension: TensorFlow has no such optimizer, but most production systems train embeddings with it
    (FBGEMM's EXACT_ROWWISE_ADAGRAD). TensorFlow's message has no member for it, so ``to_proto`` raises ConfigError;
    an EngineConfig holds it. Defaults: Adagrad's.
    """

    parameters_field = "row_wise_adagrad"
    slot_names = ("accumulators",)
    first_slot_argument = "initial_accumulator_value"
    limits = ranges(initial_accumulator_value=POSITIVE)

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1


@optimizer_class
class BoundedAdagrad(KeywordOptimizer):
    """``a' = min(a + g², max_accumulator); w' = w - clamp(lr*g/sqrt(a'), ±max_var_update)``. Slot: accumulators.

    A limit of 0 is off. Without update_accumulator_first the step is divided by the root of the previous a. Source:
    only the field comments of BoundedAdagradParameters. The defaults are penstock's and make it equal to Adagrad.
    """

    parameters_field = "bounded_adagrad"
    slot_names = ("accumulators",)
    first_slot_argument = "initial_accumulator_value"
    limits = ranges(initial_accumulator_value=POSITIVE, max_var_update=NOT_NEGATIVE, max_accumulator=NOT_NEGATIVE)

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    update_accumulator_first: bool = True
    max_var_update: float = 0.0
    max_accumulator: float = 0.0


@optimizer_class
class ProximalAdagrad(KeywordOptimizer):
    """``a' = a + g²; e = lr/sqrt(a'); p = w - e*g; w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Slot: accumulators.

    Source: ProximalAdagradParameters in TensorFlow's proto, which names the CPU kernel. Defaults: those of
    tf.compat.v1.train.ProximalAdagradOptimizer, and Adagrad's learning rate.
    """

    parameters_field = "proximal_adagrad"
    slot_names = ("accumulators",)
    first_slot_argument = "initial_accumulator_value"
    limits = ranges(initial_accumulator_value=POSITIVE, l1=NOT_NEGATIVE, l2=NOT_NEGATIVE)

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0


@optimizer_class
class MDLAdagradLight(KeywordOptimizer):
    """Loaded and saved but never run, since its formula is not public. Slots: accumulators, weights, benefits.

    Source of the fields and of their defaults (0): MdlAdagradLightParameters in TensorFlow's proto.
    """

    parameters_field = "mdl_adagrad_light"
    slot_names = ("accumulators", "weights", "benefits")
    first_slot_argument = "initial_accumulator_value"

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
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
    """Loaded and saved but never run, since the only public text on its formula contradicts itself.

    Slots: accumulators, counters, from 0. step_counter is a dynamic input like a dynamic learning rate and shares
    the numbering of tags; by default it is the engine's step number.
    Source of the fields and of their defaults (0): FrequencyAwareAdagradParameters in TensorFlow's proto.
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
