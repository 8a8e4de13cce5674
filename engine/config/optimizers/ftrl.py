"""FTRL and the two Yogi optimizers, which solve a regularised problem for each weight.

Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar
from typing import ClassVar

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
    optimizer_class,
    ranges,
)


@optimizer_class
class FTRL(Optimizer):
    """FTRL-proximal. Slots: accumulators, linears (from 0). Source: tf.tpu.experimental.embedding.FTRL.

    ``p = -learning_rate_power; a' = a + g²; z' = z + g - (a'^p - a^p)*w/lr;
    w' = (clamp(z', -l1, l1) - z')/((a'^p + beta)/lr + 2*l2)``; with multiply_linear_by_learning_rate z is scaled by
    lr. allow_zero_accumulator is kept for the proto; accumulators of 0 work with and without it.
    """

    parameters_field = "ftrl"
    slot_names = ("accumulators", "linears")
    first_slot_argument = "initial_accumulator_value"
    attribute_of: ClassVar[Mapping[str, str]] = {
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
        "lr_power": "learning_rate_power",
        "multiply_linear_by_lr": "multiply_linear_by_learning_rate",
    }
    not_in_equation = frozenset({"allow_zero_accumulator"})
    limits = ranges(initial_accumulator_value=POSITIVE)
    advised = ranges(
        l1_regularization_strength=NOT_NEGATIVE,
        l2_regularization_strength=NOT_NEGATIVE,
        beta=NOT_NEGATIVE,
        learning_rate_power=Range(-math.inf, math.nextafter(0, 1), False, "at most 0"),
    )

    learning_rate: LearningRate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool | int = False


@optimizer_class
class OnlineYogi(KeywordOptimizer):
    """FTRL (power -0.5) whose accumulator is Yogi's second moment. Slots: vs (from 0.1), linears (from 0).

    ``v' = v + (1-beta2)*sign(g² - v)*g²``. Source: comments of OnlineYogiParameters in TensorFlow's proto, and
    Zaheer et al., NeurIPS 2018; the device's formula is not public. Defaults: those of that paper (0.01, 0.999).
    """

    parameters_field = "online_yogi"
    slot_names = ("vs", "linears")
    first_slot_argument = "initial_v_value"
    limits = ranges(l1=NOT_NEGATIVE, l2=NOT_NEGATIVE, initial_v_value=NOT_NEGATIVE, beta2=SHARE)

    learning_rate: LearningRate = 0.01
    l1: float = 0.0
    l2: float = 0.0
    beta2: float = 0.999
    initial_v_value: float = 0.1


@optimizer_class
class ProximalYogi(KeywordOptimizer):
    """Yogi with a proximal step for l1 and l2. Slots: v (from 0.1), m (from 0); the second moment is first.

    ``m' = beta1*m + (1-beta1)*g; v' = v + (1-beta2)*sign(g² - v)*g²; e = lr/(sqrt(v') + epsilon); p = w - e*m';
    w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Source: comments of ProximalYogiParameters in TensorFlow's proto;
    the device's formula is not public. Defaults: those of TensorFlow 1's ProximalYogiParameters.
    """

    parameters_field = "proximal_yogi"
    slot_names = ("v", "m")
    first_slot_argument = "initial_v_value"
    limits = ranges(
        epsilon=POSITIVE, l1=NOT_NEGATIVE, l2=NOT_NEGATIVE, initial_v_value=NOT_NEGATIVE, beta1=SHARE, beta2=SHARE
    )

    learning_rate: LearningRate = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    initial_v_value: float = 0.1
