"""Adagrad, Adagrad with momentum, and row-wise Adagrad, which scale the step by one accumulator of squared gradients.

Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar
from typing import ClassVar

from penstock.config.optimizers.optimizer_class import (
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    SlotFunction,
    optimizer_class,
    positive,
)


@optimizer_class
class Adagrad(Optimizer):
    """``a' = a + g²; w' = w - lr*g/sqrt(a')``. Slot: accumulators. Source: tf.tpu.experimental.embedding.Adagrad."""

    parameters_field = "adagrad"
    slot_names = ("accumulators",)
    initial: ClassVar[Mapping[str, str]] = {"accumulators": "initial_accumulator_value"}

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

    def check(self) -> None:
        positive(initial_accumulator_value=self.initial_accumulator_value)


@optimizer_class
class AdagradMomentum(Optimizer):
    """``s = g*(a' + epsilon)^(-1/exponent); m' = momentum*m + s; w' = w - lr*m'``. Slots from 0: accumulators, momenta.

    ``a' = a + g²`` where beta2 is 1, else ``beta2*a + (1-beta2)*g²``; with use_nesterov the step is
    ``lr*(momentum*m' + s)``. Source: tf.tpu.experimental.embedding.AdagradMomentum.
    """

    parameters_field = "adagrad_momentum"
    slot_names = ("accumulators", "momenta")

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

    def check(self) -> None:
        positive(epsilon=self.epsilon, exponent=self.exponent)


@optimizer_class
class RowWiseAdagrad(KeywordOptimizer):
    """``a' = a + mean(g²) over the row; w' = w - lr*g/sqrt(a')``. Slot: accumulators, equal along each row.

    A penstock extension: TensorFlow has no such optimizer, but most production systems train embeddings with it
    (FBGEMM's EXACT_ROWWISE_ADAGRAD). TensorFlow's message has no member for it, so ``to_proto`` raises ConfigError;
    an EngineConfig holds it. Defaults: Adagrad's.
    """

    parameters_field = "row_wise_adagrad"
    slot_names = ("accumulators",)
    initial: ClassVar[Mapping[str, str]] = {"accumulators": "initial_accumulator_value"}

    learning_rate: LearningRate = 0.001
    initial_accumulator_value: float = 0.1

    def check(self) -> None:
        positive(initial_accumulator_value=self.initial_accumulator_value)
