"""Convert between optimizer classes and their messages: the fields that all optimizers share.

A new optimizer needs no change here: its class defines its fields and slots. Reading checks nothing:
a proto may contain values that a constructor refuses. runnable.py reports settings that cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from penstock.config.engine_config_pb2 import EngineConfig, TableSettings
from penstock.config.optimization_parameters_pb2 import (
    ClippingLimits,
    GradientAccumulationStatus,
    LowDimensionalPackingStatus,
    OptimizationParameters,
)
from penstock.config.optimizers import (
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    DynamicLearningRate,
    FrequencyAwareAdagrad,
    LearningRate,
    Optimizer,
    UserDefinedProgram,
)
from penstock.errors import ConfigError

Program = Callable[..., Any]


def optimization_parameters(optimizer: Optimizer, tag: int | None) -> OptimizationParameters:
    """Return the proto of ``optimizer`` as TensorFlow writes it; ``tag`` is that of a dynamic learning rate."""
    parameters = OptimizationParameters()
    if tag is None:
        parameters.learning_rate.constant = cast(float, optimizer.learning_rate)
    else:
        parameters.learning_rate.dynamic.tag = tag
    # The statuses are enums; TensorFlow stores Python bools in them, which newer protobuf runtimes refuse.
    accumulation = GradientAccumulationStatus
    parameters.gradient_accumulation_status = (
        accumulation.ENABLED if optimizer.use_gradient_accumulation else accumulation.DISABLED
    )
    packing = cast(LowDimensionalPackingStatus.Status, int(optimizer.low_dimensional_packing_status))
    parameters.low_dimensional_packing_status = packing
    _write_limits(parameters.clipping_limits, optimizer.clip_weight_min, optimizer.clip_weight_max)
    _write_limits(parameters.gradient_clipping_limits, optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    if optimizer.weight_decay_factor:
        parameters.weight_decay_factor = optimizer.weight_decay_factor
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            parameters.multiply_weight_decay_factor_by_learning_rate = True
    if optimizer.parameters_field not in OWN_OPTIMIZERS:
        optimizer.write_parameters(parameters)
    return parameters


def _write_limits(limits: ClippingLimits, lower: float | None, upper: float | None) -> None:
    """Write the bounds that are set, also at 0; without a bound, leave the limits message absent."""
    if lower is not None:
        limits.lower.value = lower
        limits.lower.SetInParent()
    if upper is not None:
        limits.upper.value = upper
        limits.upper.SetInParent()


def read_limits(limits: ClippingLimits) -> tuple[float | None, float | None]:
    """Return (lower, upper) of a limits message; None for an open side."""
    lower = limits.lower.value if limits.HasField("lower") else None
    upper = limits.upper.value if limits.HasField("upper") else None
    return lower, upper


def accumulates(parameters: OptimizationParameters) -> bool:
    """Return whether gradients are summed before the update: UNSPECIFIED means yes."""
    return parameters.gradient_accumulation_status != GradientAccumulationStatus.DISABLED


def dynamic_tag(parameters: OptimizationParameters) -> int | None:
    """Return the tag of a dynamic rate, None for a constant one. Presence decides: tag 0 is an empty message."""
    rate = parameters.learning_rate
    return rate.dynamic.tag if rate.WhichOneof("learning_rate") == "dynamic" else None


def settings_of(message: EngineConfig, name: str) -> TableSettings:
    """Return the settings of a table; empty ones if it has none."""
    return next((settings for settings in message.table if settings.name == name), TableSettings())


def algorithm_of(message: EngineConfig, index: int) -> str | None:
    """Return the optimizer's field of table ``index``: a member of OptimizationParameters, or one of penstock's."""
    table = message.tpu_embedding_configuration.table_descriptor[index]
    own: str | None = settings_of(message, table.name).WhichOneof("optimizer")
    return table.optimization_parameters.WhichOneof("parameters") or own


def initial_values(settings: TableSettings) -> dict[str, float]:
    """Return the initial slot values in ``settings``, by slot."""
    return {slot.name: slot.initial_value for slot in settings.slot if slot.HasField("initial_value")}


def read_optimizer(
    message: EngineConfig, index: int, learning_rate: LearningRate, program: Program | None
) -> Optimizer:
    """Return the optimizer of table ``index`` as an instance of its class.

    program : of a UserDefinedProgram, which raises ConfigError without one
    """
    table = message.tpu_embedding_configuration.table_descriptor[index]
    algorithm = algorithm_of(message, index) or ""
    given = initial_values(settings_of(message, table.name))
    if algorithm == UserDefinedProgram.parameters_field:
        if program is None:
            raise ConfigError(
                f"table '{table.name}': the program of a file is XLA's own form, which is kept but not run; "
                "build the configuration in Python, with UserDefinedProgram(program)"
            )
        optimizer: Optimizer = UserDefinedProgram(program, initial_slot_values=_in_slot_order(given))
    else:
        optimizer = OPTIMIZERS[algorithm]()
    _read_common(optimizer, table.optimization_parameters, learning_rate)
    if algorithm not in OWN_OPTIMIZERS:
        own = getattr(table.optimization_parameters, algorithm)
        optimizer.take_proto_values({name: getattr(own, name) for name in optimizer.fields()})
    if isinstance(optimizer, FrequencyAwareAdagrad):
        counter = table.optimization_parameters.frequency_aware_adagrad
        has_one = counter.HasField("step_counter")
        optimizer.step_counter = DynamicLearningRate(counter.step_counter.tag) if has_one else None
    for slot, attribute in optimizer.initial.items():
        if slot in given:
            setattr(optimizer, attribute, given[slot])
    return optimizer


def _read_common(optimizer: Optimizer, parameters: OptimizationParameters, learning_rate: LearningRate) -> None:
    """Set the common attributes one by one: a proto may clip without accumulation, which a constructor refuses."""
    optimizer.learning_rate = learning_rate
    optimizer.use_gradient_accumulation = accumulates(parameters)
    optimizer.clip_weight_min, optimizer.clip_weight_max = read_limits(parameters.clipping_limits)
    optimizer.clip_gradient_min, optimizer.clip_gradient_max = read_limits(parameters.gradient_clipping_limits)
    optimizer.weight_decay_factor = parameters.weight_decay_factor or None
    times_rate = parameters.multiply_weight_decay_factor_by_learning_rate
    optimizer.multiply_weight_decay_factor_by_learning_rate = times_rate or None
    status = parameters.low_dimensional_packing_status
    # As in TensorFlow's classes, False and True are the enum's first two values; DISABLED is the int 2.
    optimizer.low_dimensional_packing_status = bool(status) if status in (0, 1) else int(status)


_SLOT = re.compile(r"Slot_(\d+)")


def _in_slot_order(given: Mapping[str, float]) -> tuple[float, ...]:
    """Return the initial values of Slot_0, Slot_1, … in order."""
    numbered = [(int(match[1]), value) for name, value in given.items() if (match := _SLOT.fullmatch(name))]
    return tuple(value for _, value in sorted(numbered))
