"""Momentum, RMSProp, centered RMSProp and Adadelta: optimizers of TensorFlow's proto that have no TensorFlow class.

Arguments are named like the proto's fields. Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from penstock.config.optimizers.optimizer_class import (
    KeywordOptimizer,
    LearningRate,
    not_negative,
    optimizer_class,
    positive,
    share,
)


@optimizer_class
class Momentum(KeywordOptimizer):
    """``m' = momentum*m + g; w' = w - lr*m'``, with use_nesterov ``w' = w - lr*(g + momentum*m')``. Slot: momenta.

    Source: MomentumParameters in TensorFlow's proto, which names the CPU kernel. Defaults: SGD's learning rate and
    the customary 0.9.
    """

    parameters_field = "momentum"
    slot_names = ("momenta",)

    learning_rate: LearningRate = 0.01
    momentum: float = 0.9
    use_nesterov: bool = False


@optimizer_class
class RMSProp(KeywordOptimizer):
    """``ms' = rho*ms + (1-rho)*g²; mom' = momentum*mom + lr*g/sqrt(ms' + epsilon); w' = w - mom'``.

    Slots: ms (from 1, as in TensorFlow 1), mom (from 0). Source: RmsPropParameters in TensorFlow's proto, which
    names the CPU kernel. Defaults: tf.keras.optimizers.RMSprop's.
    """

    parameters_field = "rms_prop"
    slot_names = ("ms", "mom")
    initial: ClassVar[Mapping[str, str]] = {"ms": "initial_ms_value"}

    learning_rate: LearningRate = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    initial_ms_value: float = 1.0

    def check(self) -> None:
        share(rho=self.rho)
        positive(epsilon=self.epsilon)
        not_negative(initial_ms_value=self.initial_ms_value)


@optimizer_class
class CenteredRMSProp(KeywordOptimizer):
    """RMSProp that divides by ``sqrt(ms' - mg'² + epsilon)``, ``mg' = rho*mg + (1-rho)*g``.

    Slots: ms (from 1), mom, mg (from 0). Source: CenteredRmsPropParameters in TensorFlow's proto, which names the
    CPU kernel. Defaults: RMSProp's.
    """

    parameters_field = "centered_rms_prop"
    slot_names = ("ms", "mom", "mg")
    initial: ClassVar[Mapping[str, str]] = {"ms": "initial_ms_value"}

    learning_rate: LearningRate = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    initial_ms_value: float = 1.0

    def check(self) -> None:
        share(rho=self.rho)
        positive(epsilon=self.epsilon)
        not_negative(initial_ms_value=self.initial_ms_value)


@optimizer_class
class Adadelta(KeywordOptimizer):
    """``a' = rho*a + (1-rho)*g²; u = g*sqrt(d + epsilon)/sqrt(a' + epsilon); d' = rho*d + (1-rho)*u²; w' = w - lr*u``.

    Slots: accumulators (a), updates (d), from 0. Source: AdadeltaParameters in TensorFlow's proto, which names the
    CPU kernel. Defaults: tf.keras.optimizers.Adadelta's.
    """

    parameters_field = "adadelta"
    slot_names = ("accumulators", "updates")

    learning_rate: LearningRate = 0.001
    rho: float = 0.95
    epsilon: float = 1e-7

    def check(self) -> None:
        share(rho=self.rho)
        positive(epsilon=self.epsilon)
