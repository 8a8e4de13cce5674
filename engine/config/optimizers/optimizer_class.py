"""What all optimizer classes share: arguments, checks, equality, and how a class stands in its proto message.

The classes themselves stand in one file per family (adagrad.py, adam.py, …), the list of them in optimizers.py. The
update equations are penstock.updates'; tables and files are not known here.
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
    """A learning rate that comes with each step, as value number ``tag`` of its rates."""

    tag: int


LearningRate = float | Callable[..., Any] | DynamicLearningRate
Clip = float | tuple[float | None, float | None] | None
SlotFunction = Callable[..., Any] | None


class Optimizer:
    """What all optimizers share. A subclass says its proto member, its slots and its own parameters.

    Equality is TensorFlow's: the other is an instance of this class and the attributes are equal, in the order in
    which they were set. NaN therefore equals nothing, and 1 equals 1.0. ``slot_variable_creation_fn`` is accepted and
    kept as in TensorFlow; it is never called, since the engine lays out the slots itself.
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
        """ConfigError for an argument of this class that has no meaning. A NaN passes, as in TensorFlow."""

    @property
    def non_lazy(self) -> bool:
        """Every row is updated in each step, with a gradient of 0 where none came."""
        return False

    def slots(self) -> tuple[tuple[str, float], ...]:
        """(name, initial value) of every slot, in the order of TensorFlow's load and retrieve operations."""
        return tuple((slot, self._initial_value(slot)) for slot in self.slot_names)

    def _initial_value(self, slot: str) -> float:
        return getattr(self, self.initial[slot]) if slot in self.initial else 0.0

    @classmethod
    def fields(cls) -> dict[str, bool]:
        """The numbers and switches of this optimizer's own proto message: name -> whether it is a switch."""
        member = OptimizationParameters.DESCRIPTOR.fields_by_name.get(cls.parameters_field)
        if member is None or member.message_type is None:
            return {}
        scalars = (field for field in member.message_type.fields if field.message_type is None)
        return {field.name: field.type == FieldDescriptor.TYPE_BOOL for field in scalars}

    def proto_values(self) -> dict[str, Any]:
        """What this optimizer's own proto message holds, by field."""
        return {field: getattr(self, self.attribute_of.get(field, field)) for field in self.fields()}

    def take_proto_values(self, values: Mapping[str, Any]) -> None:
        """The inverse of ``proto_values``, unchecked: a proto may hold what the constructor refuses."""
        for field, value in values.items():
            setattr(self, self.attribute_of.get(field, field), value)

    def write_parameters(self, parameters: OptimizationParameters) -> None:
        """Select this algorithm in ``parameters`` and fill its own message."""
        message = getattr(parameters, self.parameters_field)
        message.SetInParent()
        for field, value in self.proto_values().items():
            setattr(message, field, value)

    def __eq__(self, other: object) -> bool:
        # False and not NotImplemented: a base class must not answer for its subclass.
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
    """A dataclass with ``Optimizer``'s equality, whose clipvalue is an argument only and no attribute."""
    made = dataclasses.dataclass(eq=False, repr=False)(cls)
    if "clipvalue" in vars(made):
        delattr(made, "clipvalue")
    return made


@dataclass(eq=False, repr=False, kw_only=True)
class KeywordOptimizer(Optimizer):
    """The arguments that all optimizers have, by keyword: for the classes that TensorFlow has no class for."""

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
    """The schedule whose value is the number of the step: for optimizers that count steps."""
    return float(step)


def positive(**arguments: float) -> None:
    """ConfigError for an argument that is not above 0."""
    for name, value in arguments.items():
        if _number(name, value) <= 0:
            raise ConfigError(f"{name} must be > 0, got {value!r}")


def not_negative(**arguments: float) -> None:
    """ConfigError for an argument below 0."""
    for name, value in arguments.items():
        if _number(name, value) < 0:
            raise ConfigError(f"{name} must be at least 0, got {value!r}")


def share(**arguments: float) -> None:
    """ConfigError for an argument outside [0, 1)."""
    for name, value in arguments.items():
        if _number(name, value) < 0 or value >= 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value!r}")


def _number(name: str, value: Any) -> Any:
    """value, of any type that is a number's. As in TensorFlow a TypeError where it is none."""
    try:
        return value + 0.0
    except TypeError:
        raise TypeError(f"{name} must be a number, got {value!r}") from None


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
