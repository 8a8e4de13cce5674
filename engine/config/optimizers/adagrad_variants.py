"""The Adagrad variants of TensorFlow's proto that have no TensorFlow class; two of them have no public formula either.

Arguments are named like the proto's fields. Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.config.optimizers.optimizer_class import (
    KeywordOptimizer,
    LearningRate,
    global_step,
    not_negative,
    optimizer_class,
    positive,
)


@optimizer_class
class BoundedAdagrad(KeywordOptimizer):
    """``a' = min(a + g², max_accumulator); w' = w - clamp(lr*g/sqrt(a'), ±max_var_update)``. Slot: accumulators.

    A limit of 0 is off. Without update_accumulator_first the step is divided by the root of the previous a. Source:
    only the field comments of BoundedAdagradParameters. The defaults are penstock's and make it equal to Adagrad.
    """

    parameters_field = "bounded_adagrad"
    slot_names = ("accumulators",)
    initial: ClassVar[Mapping[str, str]] = {"accumulators": "initial_accumulator_value"}

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    update_accumulator_first: bool = True
    max_var_update: float = 0.0
    max_accumulator: float = 0.0

    def check(self) -> None:
        positive(initial_accumulator_value=self.initial_accumulator_value)
        not_negative(max_var_update=self.max_var_update, max_accumulator=self.max_accumulator)


@optimizer_class
class ProximalAdagrad(KeywordOptimizer):
    """``a' = a + g²; e = lr/sqrt(a'); p = w - e*g; w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Slot: accumulators.

    Source: ProximalAdagradParameters in TensorFlow's proto, which names the CPU kernel. Defaults: those of
    tf.compat.v1.train.ProximalAdagradOptimizer, and Adagrad's learning rate.
    """

    parameters_field = "proximal_adagrad"
    slot_names = ("accumulators",)
    initial: ClassVar[Mapping[str, str]] = {"accumulators": "initial_accumulator_value"}

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0

    def check(self) -> None:
        positive(initial_accumulator_value=self.initial_accumulator_value)
        not_negative(l1=self.l1, l2=self.l2)


@optimizer_class
class MDLAdagradLight(KeywordOptimizer):
    """Loaded and saved but never run, since its formula is not public. Slots: accumulators, weights, benefits.

    Source of the fields and of their defaults (0): MdlAdagradLightParameters in TensorFlow's proto.
    """

    parameters_field = "mdl_adagrad_light"
    slot_names = ("accumulators", "weights", "benefits")
    initial: ClassVar[Mapping[str, str]] = {"accumulators": "initial_accumulator_value"}

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
