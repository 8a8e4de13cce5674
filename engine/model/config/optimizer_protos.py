"""Convert between optimizer classes and their messages: the fields that all optimizers share.

A new optimizer needs no change here: its class defines its fields and slots. Reading checks nothing:
a proto may contain values that a constructor refuses. runnable.py reports settings that cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from penstock.base.errors import ConfigError
from penstock.model.config.optimization_parameters_pb2 import (
    ClippingLimits,
    GradientAccumulationStatus,
    LowDimensionalPackingStatus,
    OptimizationParameters,
)
from penstock.model.config.proto_views import TableMessage, read_limits
from penstock.model.updates import (
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    DynamicLearningRate,
    FrequencyAwareAdagrad,
    LearningRate,
    Optimizer,
    UserDefinedProgram,
)

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
    for bound, value in ((limits.lower, lower), (limits.upper, upper)):
        if value is not None:
            bound.value = value
            bound.SetInParent()


def read_optimizer(table: TableMessage, learning_rate: LearningRate, program: Program | None) -> Optimizer:
    """Return the optimizer of a table as an instance of its class.

    program : of a UserDefinedProgram, which raises ConfigError without one
    """
    if table.algorithm == UserDefinedProgram.parameters_field:
        if program is None:
            raise ConfigError(
                f"table '{table.name}': the program of a file is XLA's own form, which is kept but not run; "
                "build the configuration in Python, with UserDefinedProgram(program)"
            )
        optimizer: Optimizer = UserDefinedProgram(program, initial_slot_values=_in_slot_order(table.initial_values))
    else:
        optimizer = OPTIMIZERS[table.algorithm]()
    _read_common(optimizer, table, learning_rate)
    optimizer.take_proto_values(table.hyper_parameters)
    if isinstance(optimizer, FrequencyAwareAdagrad):
        counter = table.parameters.frequency_aware_adagrad
        has_one = counter.HasField("step_counter")
        optimizer.step_counter = DynamicLearningRate(counter.step_counter.tag) if has_one else None
    if optimizer.first_slot_argument is not None and optimizer.slot_names[0] in table.initial_values:
        setattr(optimizer, optimizer.first_slot_argument, table.initial_values[optimizer.slot_names[0]])
    return optimizer


def _read_common(optimizer: Optimizer, table: TableMessage, learning_rate: LearningRate) -> None:
    """Set the common attributes one by one: a proto may clip without accumulation, which a constructor refuses."""
    parameters = table.parameters
    optimizer.learning_rate = learning_rate
    optimizer.use_gradient_accumulation = table.accumulates
    optimizer.clip_weight_min, optimizer.clip_weight_max = read_limits(parameters.clipping_limits)
    optimizer.clip_gradient_min, optimizer.clip_gradient_max = read_limits(parameters.gradient_clipping_limits)
    optimizer.weight_decay_factor = parameters.weight_decay_factor or None
    times_rate = parameters.multiply_weight_decay_factor_by_learning_rate
    optimizer.multiply_weight_decay_factor_by_learning_rate = times_rate or None
    status = parameters.low_dimensional_packing_status
    # As in TensorFlow's classes, False and True are the enum's first two values; DISABLED is the int 2.
    optimizer.low_dimensional_packing_status = bool(status) if status in (0, 1) else int(status)


_SLOT = re.compile(r"Slot_(\d+)")


def _in_slot_order(starts: Mapping[str, float]) -> tuple[float, ...]:
    """Return the initial values of Slot_0, Slot_1, … in order."""
    numbered = [(int(match[1]), value) for name, value in starts.items() if (match := _SLOT.fullmatch(name))]
    return tuple(value for _, value in sorted(numbered))
