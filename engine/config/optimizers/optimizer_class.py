"""The base of all optimizer classes: arguments, checks, equality, and the mapping to a proto message.

Each family of classes has a module (adagrad_family.py, adam.py, …); __init__.py lists them. penstock.updates has the
update equations. This module does not depend on tables or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from google.protobuf.descriptor import FieldDescriptor

from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.errors import ConfigError


@dataclass(frozen=True)
class DynamicLearningRate:
    """A learning rate supplied with each step, as value number ``tag`` of the step's rates."""

    tag: int


LearningRate = float | Callable[..., Any] | DynamicLearningRate
Clip = float | tuple[float | None, float | None] | None
SlotFunction = Callable[..., Any] | None


class Optimizer:
    """The base class of all optimizers. A subclass specifies its proto member, its slots and its parameters.

    Equality is TensorFlow's: the other is an instance of this class, and the attributes are equal in the order in
    which they were set. Therefore NaN equals nothing, and 1 equals 1.0. ``slot_variable_creation_fn`` is accepted and
    kept as in TensorFlow but never called, since the engine lays out the slots.
    """

    parameters_field: ClassVar[str]
    """The member of ``OptimizationParameters.parameters`` that selects this algorithm."""
    slot_names: ClassVar[tuple[str, ...]] = ()
    """In the order of TensorFlow's load and retrieve operations."""
    initial: ClassVar[Mapping[str, str]] = {}
    """Slot -> the argument that says its initial value; a slot that is not listed starts at 0."""
    attribute_of: ClassVar[Mapping[str, str]] = {}
    """Field of the proto message -> the attribute that holds it, where the two names differ."""
    not_in_equation: ClassVar[frozenset[str]] = frozenset()
    """Fields of the proto message that the update equation does not read."""

    learning_rate: LearningRate
    use_gradient_accumulation: bool
    clip_weight_min: float | None
    clip_weight_max: float | None
    weight_decay_factor: float | None
    multiply_weight_decay_factor_by_learning_rate: bool | None
    slot_variable_creation_fn: SlotFunction = None
    low_dimensional_packing_status: bool | int
    clip_gradient_min: float | None
    clip_gradient_max: float | None

    def __post_init__(self, clipvalue: Clip) -> None:
        if clipvalue is not None and not self.use_gradient_accumulation:
            raise ConfigError("clipvalue needs use_gradient_accumulation=True: gradients are clipped after their sum")
        self.clip_gradient_min, self.clip_gradient_max = _gradient_limits(clipvalue)
        made = self.slot_variable_creation_fn
        if made is not None and not callable(made):
            raise ConfigError(f"slot_variable_creation_fn must be callable or None, got {made!r}")
        self.check()

    def check(self) -> None:
        """Raise ConfigError for an argument of this class that is out of range. A NaN passes, as in TensorFlow."""

    @property
    def non_lazy(self) -> bool:
        """Whether each step updates every row, with a gradient of 0 for rows that have none."""
        return False

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Return (name, initial value) of every slot, in the order of TensorFlow's load and retrieve operations."""
        return tuple((slot, self._initial_value(slot)) for slot in self.slot_names)

    def _initial_value(self, slot: str) -> float:
        return getattr(self, self.initial[slot]) if slot in self.initial else 0.0

    @classmethod
    def fields(cls) -> dict[str, bool]:
        """Return the scalar fields of this optimizer's proto message: name -> whether it is a bool."""
        member = OptimizationParameters.DESCRIPTOR.fields_by_name.get(cls.parameters_field)
        if member is None or member.message_type is None:
            return {}
        scalars = (field for field in member.message_type.fields if field.message_type is None)
        return {field.name: field.type == FieldDescriptor.TYPE_BOOL for field in scalars}

    def proto_values(self) -> dict[str, Any]:
        """Return the values of this optimizer's proto message, by field."""
        return {field: getattr(self, self.attribute_of.get(field, field)) for field in self.fields()}

    def take_proto_values(self, values: Mapping[str, Any]) -> None:
        """Set the attributes from ``proto_values``, unchecked: a proto may hold values that the constructor refuses."""
        for field, value in values.items():
            setattr(self, self.attribute_of.get(field, field), value)

    def write_parameters(self, parameters: OptimizationParameters) -> None:
        """Select this algorithm in ``parameters`` and fill its message."""
        message = getattr(parameters, self.parameters_field)
        message.SetInParent()
        for field, value in self.proto_values().items():
            setattr(message, field, value)

    def __eq__(self, other: object) -> bool:
        # After NotImplemented, Python would ask the other's class, and a base class accepts instances of its subclass.
        if not isinstance(other, self.__class__):
            return False
        return all(a == b for a, b in zip(vars(self).items(), vars(other).items(), strict=False))

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


T = TypeVar("T")


@dataclass_transform(eq_default=False)
def optimizer_class(cls: type[T]) -> type[T]:
    """Return ``cls`` as a dataclass with ``Optimizer``'s equality, whose clipvalue is an argument but no attribute."""
    made = dataclasses.dataclass(eq=False, repr=False)(cls)
    if "clipvalue" in vars(made):
        delattr(made, "clipvalue")
    return made


@dataclass(eq=False, repr=False, kw_only=True)
class KeywordOptimizer(Optimizer):
    """The base of optimizers that TensorFlow has no class for: the common arguments, keyword-only."""

    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    low_dimensional_packing_status: bool | int = False


delattr(KeywordOptimizer, "clipvalue")


def global_step(step: int) -> float:
    """Return the number of the step: the schedule of optimizers that count steps."""
    return float(step)


def positive(**arguments: float) -> None:
    """Raise ConfigError for an argument that is 0 or below."""
    for name, value in arguments.items():
        if _number(name, value) <= 0:
            raise ConfigError(f"{name} must be > 0, got {value!r}")


def not_negative(**arguments: float) -> None:
    """Raise ConfigError for an argument below 0."""
    for name, value in arguments.items():
        if _number(name, value) < 0:
            raise ConfigError(f"{name} must be at least 0, got {value!r}")


def share(**arguments: float) -> None:
    """Raise ConfigError for an argument outside [0, 1)."""
    for name, value in arguments.items():
        if _number(name, value) < 0 or value >= 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value!r}")


def _number(name: str, value: Any) -> Any:
    """Return ``value`` plus 0.0. Raise TypeError, as TensorFlow does, if it is not a number."""
    try:
        return value + 0.0
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None


def _gradient_limits(clipvalue: Clip) -> tuple[float | None, float | None]:
    """Return (lower, upper) as TensorFlow reads clipvalue: None leaves both sides open, a number c means (-c, c)."""
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
