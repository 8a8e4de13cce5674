"""Adam and Lion, lazy (a step updates only the rows that it touches) and non-lazy.

Arguments and their proto fields only; penstock.updates has the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar
from typing import Any, ClassVar

from penstock.config.optimizers.optimizer_class import (
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    SlotFunction,
    optimizer_class,
    positive,
    share,
)
from penstock.errors import ConfigError


@optimizer_class
class Adam(Optimizer):
    """``m' = beta_1*m + (1-beta_1)*g; v' = beta_2*v + (1-beta_2)*g²; w' = w - lr*m'/sqrt(v' + epsilon²)``.

    Without sum_inside_sqrt the divisor is ``sqrt(v') + epsilon``. Slots: momenta, velocities, from 0. There is no
    bias correction: include it in the learning rate. Source: tf.tpu.experimental.embedding.Adam.
    """

    parameters_field = "adam"
    slot_names = ("momenta", "velocities")
    attribute_of: ClassVar[Mapping[str, str]] = {
        "beta1": "beta_1",
        "beta2": "beta_2",
        "use_sum_inside_sqrt": "sum_inside_sqrt",
    }
    not_in_equation = frozenset({"use_non_lazy_adam"})

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

    def check(self) -> None:
        share(beta_1=self.beta_1, beta_2=self.beta_2)
        positive(epsilon=self.epsilon)
        if not self.use_gradient_accumulation and not self.lazy_adam:
            raise ConfigError("lazy_adam=False needs use_gradient_accumulation=True: it updates every row once a step")

    @property
    def non_lazy(self) -> bool:
        return not self.lazy_adam

    # The proto's field is the negation of the argument, which attribute_of cannot express.
    @property
    def use_non_lazy_adam(self) -> bool:
        """The proto's field, which is ``not lazy_adam``."""
        return not self.lazy_adam

    def take_proto_values(self, values: Mapping[str, Any]) -> None:
        rest = dict(values)
        self.lazy_adam = not rest.pop("use_non_lazy_adam", False)
        super().take_proto_values(rest)


@optimizer_class
class Lion(KeywordOptimizer):
    """``u = beta1*m + (1-beta1)*g; w' = w - lr*sign(u); m' = beta2*m + (1-beta2)*g``. Slot: momenta, from 0.

    Source: LionParameters in TensorFlow's proto. Defaults: those of Chen et al., 2023 (0.9, 0.99, a rate of 1e-4).
    """

    parameters_field = "lion"
    slot_names = ("momenta",)
    not_in_equation = frozenset({"use_non_lazy_lion"})

    learning_rate: LearningRate = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    use_non_lazy_lion: bool = False

    def check(self) -> None:
        share(beta1=self.beta1, beta2=self.beta2)
        if not self.use_gradient_accumulation and self.use_non_lazy_lion:
            raise ConfigError(
                "use_non_lazy_lion=True needs use_gradient_accumulation=True: it updates every row once a step"
            )

    @property
    def non_lazy(self) -> bool:
        return self.use_non_lazy_lion
