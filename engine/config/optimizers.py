"""The optimizer classes of ``tf.tpu.experimental.embedding``: same signatures, defaults, validation and equality.

A class holds what its user said, unrounded, and knows its own proto message and its slots. What all share in the
proto (learning rate, clipping, decay, accumulation, packing) is written and read in optimizer_proto.py, once. The
update equations stand in penstock.updates; tables and files are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.rounding import float32
from penstock.errors import ConfigError
from penstock.updates import UpdateRule


@dataclass(frozen=True)
class DynamicLearningRate:
    """A learning rate that comes with each step, as value number ``tag`` of its rates."""

    tag: int


LearningRate = float | Callable[[], Any] | DynamicLearningRate
Clip = float | tuple[float | None, float | None] | None


class Optimizer:
    """What all optimizers share. A subclass says its proto member, its slots and its own parameters.

    Equality is TensorFlow's: the other is an instance of this class and the attributes are equal, in the order in
    which they were set. NaN therefore equals nothing, and 1 equals 1.0. ``slot_variable_creation_fn`` is accepted and
    kept as in TensorFlow; it is never called, since the engine lays out the slots itself.
    """

    parameters_field: ClassVar[str]
    """The member of ``OptimizationParameters.parameters`` that selects this algorithm."""

    def __init__(
        self,
        learning_rate: LearningRate,
        use_gradient_accumulation: bool,
        clip_weight_min: float | None,
        clip_weight_max: float | None,
        weight_decay_factor: float | None,
        multiply_weight_decay_factor_by_learning_rate: bool | None,
        clipvalue: Clip,
        slot_variable_creation_fn: Callable[..., Any] | None,
        low_dimensional_packing_status: bool,
    ) -> None:
        self.learning_rate = learning_rate
        self.use_gradient_accumulation = use_gradient_accumulation
        self.clip_weight_min = clip_weight_min
        self.clip_weight_max = clip_weight_max
        if clipvalue is not None and not use_gradient_accumulation:
            raise ConfigError("clipvalue needs use_gradient_accumulation=True: gradients are clipped after their sum")
        self.clip_gradient_min, self.clip_gradient_max = _gradient_limits(clipvalue)
        self.weight_decay_factor = weight_decay_factor
        self.multiply_weight_decay_factor_by_learning_rate = multiply_weight_decay_factor_by_learning_rate
        if slot_variable_creation_fn is not None and not callable(slot_variable_creation_fn):
            raise ConfigError(f"slot_variable_creation_fn must be callable or None, got {slot_variable_creation_fn!r}")
        self.slot_variable_creation_fn = slot_variable_creation_fn
        self.low_dimensional_packing_status = low_dimensional_packing_status

    def slots(self) -> tuple[tuple[str, float], ...]:
        """(name, initial value) of every slot, in the order of TensorFlow's load and retrieve operations."""
        return ()

    def write_parameters(self, parameters: OptimizationParameters) -> None:
        """Select this algorithm in ``parameters`` and fill its own message."""
        getattr(parameters, self.parameters_field).SetInParent()

    @classmethod
    def read_arguments(cls, parameters: OptimizationParameters, slots: Mapping[str, float]) -> dict[str, Any]:
        """The constructor arguments of this class alone: from its own message, and from given initial values."""
        return {}

    def __eq__(self, other: object) -> bool:
        # False and not NotImplemented: a base class must not answer for its subclass.
        if not isinstance(other, self.__class__):
            return False
        return all(a == b for a, b in zip(vars(self).items(), vars(other).items(), strict=False))

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class SGD(Optimizer):
    """``w' = w - lr*g``. No slots. Source: tf.tpu.experimental.embedding.SGD."""

    parameters_field = "stochastic_gradient_descent"

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        use_gradient_accumulation: bool = True,
        clip_weight_min: float | None = None,
        clip_weight_max: float | None = None,
        weight_decay_factor: float | None = None,
        multiply_weight_decay_factor_by_learning_rate: bool | None = None,
        clipvalue: Clip = None,
        low_dimensional_packing_status: bool = False,
    ) -> None:
        super().__init__(
            learning_rate,
            use_gradient_accumulation,
            clip_weight_min,
            clip_weight_max,
            weight_decay_factor,
            multiply_weight_decay_factor_by_learning_rate,
            clipvalue,
            None,
            low_dimensional_packing_status,
        )


class Adagrad(Optimizer):
    """``a' = a + g²; w' = w - lr*g/sqrt(a')``. Slot: accumulators. Source: tf.tpu.experimental.embedding.Adagrad."""

    parameters_field = "adagrad"

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        use_gradient_accumulation: bool = True,
        clip_weight_min: float | None = None,
        clip_weight_max: float | None = None,
        weight_decay_factor: float | None = None,
        multiply_weight_decay_factor_by_learning_rate: bool | None = None,
        slot_variable_creation_fn: Callable[..., Any] | None = None,
        clipvalue: Clip = None,
        low_dimensional_packing_status: bool = False,
    ) -> None:
        super().__init__(
            learning_rate,
            use_gradient_accumulation,
            clip_weight_min,
            clip_weight_max,
            weight_decay_factor,
            multiply_weight_decay_factor_by_learning_rate,
            clipvalue,
            slot_variable_creation_fn,
            low_dimensional_packing_status,
        )
        if initial_accumulator_value <= 0:
            raise ConfigError(f"initial_accumulator_value must be > 0, got {initial_accumulator_value!r}")
        self.initial_accumulator_value = initial_accumulator_value

    def slots(self) -> tuple[tuple[str, float], ...]:
        return (("accumulators", self.initial_accumulator_value),)

    @classmethod
    def read_arguments(cls, parameters: OptimizationParameters, slots: Mapping[str, float]) -> dict[str, Any]:
        return {"initial_accumulator_value": slots["accumulators"]} if "accumulators" in slots else {}


OPTIMIZERS: dict[str, type[Optimizer]] = {cls.parameters_field: cls for cls in (SGD, Adagrad)}


def _gradient_limits(clipvalue: Clip) -> tuple[float | None, float | None]:
    """TensorFlow's reading: None leaves both sides open, a tuple is (lower, upper), a number c is (-c, c)."""
    if clipvalue is None:
        return None, None
    if isinstance(clipvalue, tuple):
        if len(clipvalue) != 2:
            raise ConfigError(f"clipvalue must be a number or (lower, upper), got {len(clipvalue)} values")
        return clipvalue
    try:
        return -1.0 * clipvalue, clipvalue
    except TypeError:
        raise TypeError(f"clipvalue must be a number or a tuple (lower, upper), got {clipvalue!r}") from None


def update_rule(optimizer: Optimizer) -> UpdateRule:
    """The fixed part of the optimizer's update, in float32 numbers; equal rules share compiled programs."""
    decay = float32(optimizer.weight_decay_factor or 0.0)
    return UpdateRule(
        algorithm=optimizer.parameters_field,
        num_slots=len(optimizer.slots()),
        gradient_min=_bound(optimizer.clip_gradient_min, -math.inf),
        gradient_max=_bound(optimizer.clip_gradient_max, math.inf),
        weight_decay=decay,
        decay_times_learning_rate=bool(decay and optimizer.multiply_weight_decay_factor_by_learning_rate),
        weight_min=_bound(optimizer.clip_weight_min, -math.inf),
        weight_max=_bound(optimizer.clip_weight_max, math.inf),
    )


def _bound(value: float | None, open_side: float) -> float | None:
    """A clip bound in float32; one that clips nothing is None, so that it costs nothing and equals an absent one."""
    if value is None or float32(value) == open_side:
        return None
    return float32(value)
