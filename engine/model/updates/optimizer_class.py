"""The base of all optimizer classes: arguments, checks, equality, and the mapping to a proto message.

Each family of classes has a module (adagrad_family.py, moments.py, …). A class declares its arguments, slots, ranges
and equation; pyx/update_equations.h has the C transcript of the equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from google.protobuf.descriptor import FieldDescriptor

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import TableSettings
from penstock.model.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.model.updates.rule import Array, Ops, Result, Slots, UpdateRule, float32


@dataclass(frozen=True)
class DynamicLearningRate:
    """A learning rate that is supplied with each step, as value number ``tag`` of the step's rates.

    Parameters
    ----------
    tag : int
        Index into the ``learning_rates`` of a call, an option or a column; from 0.

    References
    ----------
    ``DynamicLearningRate`` in TensorFlow's ``optimization_parameters.proto``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(ps.DynamicLearningRate(0)), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[1.0, 2.0]])}, learning_rates=[0.25])
    True
    >>> engine.lookup("user", [5])
    array([[0.75, 0.5 ]], dtype=float32)
    """

    tag: int


LearningRate = float | Callable[..., Any] | DynamicLearningRate
"""What optimizers take: a number, a function of the global step, or a ``DynamicLearningRate``."""
Clip = float | tuple[float | None, float | None] | None
SlotFunction = Callable[..., Any] | None
Equation = Callable[[Ops, UpdateRule, Array, Array, Array, Slots], Result]


class Range(NamedTuple):
    """The range of an argument: from ``low`` (excluded if open_low) to below ``high``, if there is one. It admits NaN.

    text : in "it should be above 0"
    refusal : in the constructors' "must be > 0", if that differs
    """

    low: float
    high: float | None
    open_low: bool
    text: str
    refusal: str = ""

    def excludes(self, value: float) -> bool:
        return (value <= self.low if self.open_low else value < self.low) or (
            self.high is not None and value >= self.high
        )

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError if the range excludes ``value``; TypeError, as TensorFlow does, if it is not a number."""
        try:
            value + 0.0
        except TypeError:
            raise TypeError(f"{name} must be a number, got {value!r}") from None
        if self.excludes(value):
            raise ConfigError(f"{name} must be {self.refusal or self.text}, got {value!r}")


OWN_FIELDS = frozenset(field.name for field in TableSettings.DESCRIPTOR.oneofs_by_name["optimizer"].fields)
"""The members of ``TableSettings.optimizer``: algorithms of penstock's own."""

SHARE = Range(0, 1, False, "at least 0 and below 1")
OPEN_SHARE = Range(0, 1, True, "above 0 and below 1")
POSITIVE = Range(0, None, True, "above 0", "> 0")
NOT_NEGATIVE = Range(0, None, False, "at least 0")


def ranges(**by_argument: Range) -> Mapping[str, Range]:
    """Return the ranges of arguments, by name."""
    return MappingProxyType(by_argument)


class Optimizer:
    """The base class of all optimizers. A subclass specifies its proto member, its slots and its arguments.

    Parameters
    ----------
    learning_rate : float, callable or DynamicLearningRate
        A constant rate; a schedule, called once per step, with ``global_step`` or without arguments; or the tag of a
        rate that is supplied with each step.
    use_gradient_accumulation : bool
        Sum the gradients of an id over all frames of a step before a single update; False applies every frame
        separately.
    clip_weight_min, clip_weight_max : float or None
        Limits of the updated weights. None leaves that side open.
    weight_decay_factor : float or None
        Decay d of ``w - d*w``, applied before the update; None or 0: off.
    multiply_weight_decay_factor_by_learning_rate : bool or None
        Whether the decay is ``d*lr``.
    slot_variable_creation_fn : callable or None
        Accepted and kept as in TensorFlow but never called, since the engine lays out the slots.
    clipvalue : float, (float or None, float or None) or None
        Limits of the gradient after its sum; a number c means (-c, c). Needs ``use_gradient_accumulation``.
    low_dimensional_packing_status : bool or int
        Kept for the proto; the engine decides the layout.

    Raises
    ------
    ConfigError
        If an argument is out of its range.
    TypeError
        If an argument is not a number, where TensorFlow raises TypeError.

    Notes
    -----
    A step clips the gradient, decays the weight, applies the optimizer's equation and clips the weight, in this order.
    Equality is TensorFlow's: the other is an instance of this class, and the attributes are equal in the order in which
    they were set. Therefore NaN equals nothing, and 1 equals 1.0.

    References
    ----------
    ``tf.tpu.experimental.embedding`` and the comments of TensorFlow's ``optimization_parameters.proto``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5, weight_decay_factor=0.1, clipvalue=1.0), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.65, 1.4 ]], dtype=float32)
    """

    parameters_field: ClassVar[str]
    """The member of ``OptimizationParameters.parameters``, or of ``TableSettings.optimizer``, that selects it."""
    slot_names: ClassVar[tuple[str, ...]] = ()
    """In the order of TensorFlow's load and retrieve operations."""
    first_slot_argument: ClassVar[str | None] = None
    """The argument with the initial value of the first slot; other slots start at 0."""
    derived_slot: ClassVar[str | None] = None
    """The slot that determines the weights: a step computes them from the slots alone."""
    attribute_of: ClassVar[Mapping[str, str]] = {}
    """Field of the proto message -> the attribute that holds it, where the two names differ."""
    not_in_equation: ClassVar[frozenset[str]] = frozenset()
    """Fields of the proto message that the update equation does not read."""
    limits: ClassVar[Mapping[str, Range]] = ranges()
    """Argument -> the range that the constructor enforces, and lint in protos."""
    advised: ClassVar[Mapping[str, Range]] = ranges()
    """Argument -> the range that only lint recommends."""
    non_lazy_field: ClassVar[str | None] = None
    """The bool field of the proto message that makes each step update every row."""
    non_lazy_argument: ClassVar[str] = ""
    """How the constructor sets it, for messages."""
    doubt: ClassVar[str] = ""
    """The part of the equation that is not public, for lint."""
    zero_is_no_op: ClassVar[bool] = False
    """Whether a gradient of 0 leaves weights and slots as they are."""
    scaled_by_rate: ClassVar[bool] = True
    """Whether the learning rate scales the update."""
    divides_by_rate: ClassVar[bool] = False
    """Whether the equation divides by the learning rate."""

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
        create_slot = self.slot_variable_creation_fn
        if create_slot is not None and not callable(create_slot):
            raise ConfigError(f"slot_variable_creation_fn must be callable or None, got {create_slot!r}")
        for name, allowed in self.limits.items():
            allowed.check(name, getattr(self, name))
        if self.non_lazy and not self.use_gradient_accumulation:
            problem = "needs use_gradient_accumulation=True: it updates every row once a step"
            raise ConfigError(f"{self.non_lazy_argument} {problem}")

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        """Return the new weights and slots of touched rows.

        Parameters
        ----------
        ops : Ops
            The array namespace.
        rule : UpdateRule
            The constants of the update.
        lr : array
            The learning rate, a scalar of w's dtype.
        g, w : array, shape (..., dim)
            Gradients and weights, of one float dtype.
        slots : tuple of array
            Each of w's shape; a slot with one number per row: (..., 1).

        Returns
        -------
        tuple of (array, tuple of array)
            Weights and slots, of the same shapes and dtype.

        Raises
        ------
        ConfigError
            If the formula is not public.
        """
        raise ConfigError(f"{rule.algorithm} cannot run: how it updates is not public")

    @staticmethod
    def derived(rule: UpdateRule, lr: Array, w: Array, slots: Slots) -> tuple[Array, Array]:
        """Return the values of ``derived_slot`` for weights that come without it: a gradient of 0 keeps the weights.

        Parameters
        ----------
        rule : UpdateRule
            The constants of the update.
        lr : float32
            The learning rate of the next step; NaN: unknown.
        w : numpy.ndarray, float32, shape (n, dim)
            The weights.
        slots : tuple of numpy.ndarray
            Each of w's shape; the values of ``derived_slot`` are not used.

        Returns
        -------
        values : numpy.ndarray
            float32, of w's shape; may be infinite or NaN where they are not determined.
        determined : numpy.ndarray
            bool, of w's shape: False where the rate is unknown or 0, or the step would divide by 0.
        """
        raise NotImplementedError(f"{rule.algorithm}: no slot determines the weights")

    @classmethod
    def has_formula(cls) -> bool:
        """Return whether the equation is public; else the optimizer can be loaded and saved, but not run.

        Returns
        -------
        bool
        """
        return cls.equation is not Optimizer.equation

    @classmethod
    def is_own(cls) -> bool:
        """Return whether it is an optimizer of penstock's: TensorFlow's message has no member for it.

        Returns
        -------
        bool
        """
        return cls.parameters_field in OWN_FIELDS

    @classmethod
    def first_slot_range(cls, hyper_parameters: Mapping[str, Any]) -> Range | None:
        """Return the range of the first slot: above 0 where the update divides by its root without an epsilon.

        Parameters
        ----------
        hyper_parameters : mapping of str to float or bool
            The values of the proto message; one that is missing is the default.

        Returns
        -------
        Range or None
        """
        return cls.limits.get(cls.first_slot_argument or "")

    @property
    def non_lazy(self) -> bool:
        """Whether each step updates every row, with a gradient of 0 for rows that have none."""
        return self.non_lazy_field is not None and getattr(self, self.non_lazy_field)

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Return every slot, in the order of TensorFlow's load and retrieve operations.

        Returns
        -------
        tuple of (str, float)
            Name and initial value of each slot.

        Examples
        --------
        >>> import penstock as ps
        >>> ps.FTRL().slots()
        (('accumulators', 0.1), ('linears', 0.0))
        """
        first = 0.0 if self.first_slot_argument is None else getattr(self, self.first_slot_argument)
        return tuple((slot, 0.0 if index else first) for index, slot in enumerate(self.slot_names))

    @classmethod
    def fields(cls) -> dict[str, bool]:
        """Return the scalar fields of this optimizer's proto message.

        Returns
        -------
        dict of str to bool
            Field → whether it is a bool.
        """
        kind: Any = TableSettings if cls.is_own() else OptimizationParameters
        member = kind.DESCRIPTOR.fields_by_name.get(cls.parameters_field)
        if member is None or member.message_type is None:
            return {}
        scalars = (field for field in member.message_type.fields if field.message_type is None)
        return {field.name: field.type == FieldDescriptor.TYPE_BOOL for field in scalars}

    @classmethod
    def range_of(cls, field: str) -> Range | None:
        """Return the range of a field of the proto message.

        Parameters
        ----------
        field : str
            The field's name.

        Returns
        -------
        Range or None
            None if the field has no range.
        """
        name = cls.attribute_of.get(field, field)
        return cls.limits.get(name) or cls.advised.get(name)

    def proto_values(self) -> dict[str, Any]:
        """Return the values of this optimizer's proto message.

        Returns
        -------
        dict of str to float or bool
            Field → value.
        """
        return {field: getattr(self, self.attribute_of.get(field, field)) for field in self.fields()}

    def take_proto_values(self, values: Mapping[str, Any]) -> None:
        """Set the attributes from ``proto_values``, unchecked: a proto may hold values that the constructor refuses.

        Parameters
        ----------
        values : mapping of str to float or bool
            Field → value.
        """
        for field, value in values.items():
            setattr(self, self.attribute_of.get(field, field), value)

    def write_parameters(self, parameters: OptimizationParameters | TableSettings) -> None:
        """Select this algorithm in a message and fill in its parameters; of penstock's own, those without the default.

        Parameters
        ----------
        parameters : OptimizationParameters or TableSettings
            The message to write to: that with a member for this optimizer.
        """
        message = getattr(parameters, self.parameters_field)
        message.SetInParent()
        defaults = type(self)().proto_values() if self.is_own() else {}
        for field, value in self.proto_values().items():
            if field not in defaults or float32(value) != float32(defaults[field]):
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


OPTIMIZERS: dict[str, type[Optimizer]] = {}
"""Every class by its member of ``OptimizationParameters.parameters``, or of ``TableSettings.optimizer`` for our own."""

T = TypeVar("T", bound=Optimizer)


@dataclass_transform(eq_default=False)
def optimizer_class(cls: type[T]) -> type[T]:
    """Register ``cls`` in OPTIMIZERS, and return it as a dataclass with ``Optimizer``'s equality.

    Its clipvalue is an argument but no attribute.
    """
    decorated = dataclasses.dataclass(eq=False, repr=False)(cls)
    if "clipvalue" in vars(decorated):
        delattr(decorated, "clipvalue")
    OPTIMIZERS[cls.parameters_field] = decorated
    return decorated


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
    """Return the number of the step: the schedule of optimizers that count steps.

    Parameters
    ----------
    step : int
        The global step.

    Returns
    -------
    float
    """
    return float(step)


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
