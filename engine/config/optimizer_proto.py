"""Between an optimizer class and ``OptimizationParameters``: what all optimizers share, written and read once.

A new optimizer needs nothing here: it brings its own part with it (``write_parameters``, ``read_arguments``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from penstock.config.optimization_parameters_pb2 import (
    ClippingLimits,
    GradientAccumulationStatus,
    LowDimensionalPackingStatus,
    OptimizationParameters,
)
from penstock.config.optimizers import OPTIMIZERS, LearningRate, Optimizer
from penstock.errors import ConfigError


def optimization_parameters(optimizer: Optimizer, tag: int | None) -> OptimizationParameters:
    """The proto of ``optimizer`` as TensorFlow writes it; ``tag`` is that of a dynamic learning rate."""
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
    if optimizer.low_dimensional_packing_status:
        parameters.low_dimensional_packing_status = LowDimensionalPackingStatus.ENABLED
    _write_limits(parameters.clipping_limits, optimizer.clip_weight_min, optimizer.clip_weight_max)
    _write_limits(parameters.gradient_clipping_limits, optimizer.clip_gradient_min, optimizer.clip_gradient_max)
    if optimizer.weight_decay_factor:
        parameters.weight_decay_factor = optimizer.weight_decay_factor
        if optimizer.multiply_weight_decay_factor_by_learning_rate:
            parameters.multiply_weight_decay_factor_by_learning_rate = True
    optimizer.write_parameters(parameters)
    return parameters


def _write_limits(limits: ClippingLimits, lower: float | None, upper: float | None) -> None:
    """Only what is set; a limits message without a bound is not created at all, a bound of 0 is."""
    if lower is not None:
        limits.lower.value = lower
        limits.lower.SetInParent()
    if upper is not None:
        limits.upper.value = upper
        limits.upper.SetInParent()


def read_limits(limits: ClippingLimits) -> tuple[float | None, float | None]:
    """(lower, upper) of a limits message; None where a side is open."""
    lower = limits.lower.value if limits.HasField("lower") else None
    upper = limits.upper.value if limits.HasField("upper") else None
    return lower, upper


def optimizer_from_proto(
    parameters: OptimizationParameters, learning_rate: LearningRate, slots: Mapping[str, float]
) -> Optimizer:
    """The class instance that ``parameters`` describes; ``slots`` are initial values that differ from the default."""
    algorithm = parameters.WhichOneof("parameters")
    if algorithm is None or algorithm not in OPTIMIZERS:
        supported = ", ".join(sorted(OPTIMIZERS))
        raise ConfigError(f"optimizer '{algorithm}' is not yet supported by this version (supported: {supported})")
    cls = OPTIMIZERS[algorithm]
    weight_min, weight_max = read_limits(parameters.clipping_limits)
    optimizer = cls(
        learning_rate=learning_rate,
        use_gradient_accumulation=accumulates(parameters),
        clip_weight_min=weight_min,
        clip_weight_max=weight_max,
        weight_decay_factor=parameters.weight_decay_factor or None,
        multiply_weight_decay_factor_by_learning_rate=parameters.multiply_weight_decay_factor_by_learning_rate or None,
        low_dimensional_packing_status=parameters.low_dimensional_packing_status == LowDimensionalPackingStatus.ENABLED,
        **cls.read_arguments(parameters, slots),
    )
    # Not through clipvalue: a proto may clip without accumulation, which the constructor refuses.
    optimizer.clip_gradient_min, optimizer.clip_gradient_max = read_limits(parameters.gradient_clipping_limits)
    return optimizer


def accumulates(parameters: OptimizationParameters) -> bool:
    """Whether gradients are summed before the update: UNSPECIFIED means yes."""
    return parameters.gradient_accumulation_status != GradientAccumulationStatus.DISABLED
