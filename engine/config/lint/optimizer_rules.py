"""Rules about one table's optimization parameters that are legal and can be run, but look like a mistake.

runnable.py reports parameters that cannot be run, proto_rules.py those that loading refuses; number_rules.py has the
rules about single numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.config.engine_config_pb2 import EngineConfig
from penstock.config.lint.findings import Finding, finding
from penstock.config.lint.number_rules import lost_in_float32, out_of_range
from penstock.config.optimization_parameters_pb2 import LowDimensionalPackingStatus, OptimizationParameters
from penstock.config.optimizers import WITHOUT_FORMULA
from penstock.config.optimizers.proto_conversion import (
    accumulates,
    algorithm_of,
    dynamic_tag,
    initial_values,
    read_limits,
    settings_of,
)

# Optimizers for which a gradient of 0 is a no-op: packing does not change the untouched rows of a chunk.
ZERO_IS_NO_OP = {"stochastic_gradient_descent", "adagrad", "row_wise_adagrad", "ftrl", "bounded_adagrad"}
PACKED_DIMENSIONS = (1, 2, 4)
WITHOUT_RATE = {"assign", "user_defined_program", "frequency_estimator"}  # the rate does not scale their update
DIVIDES_BY_RATE = {"ftrl", "online_yogi"}
DOUBTS = {
    "adagrad_momentum": "the proto's comment and TensorFlow's source differ; the source is followed",
    "bounded_adagrad": "only comments on its fields are public",
    "online_yogi": "only the paper and comments on its fields are public",
    "proximal_yogi": "only the paper and comments on its fields are public",
}


def lint_table(message: EngineConfig, index: int, written: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the findings about table ``index`` of a valid message."""
    table = message.tpu_embedding_configuration.table_descriptor[index]
    where, parameters = f"table_descriptor[{index}].optimization_parameters", table.optimization_parameters
    who, algorithm = f"table '{table.name}'", algorithm_of(message, index) or ""
    yield from _rate(where, who, algorithm, parameters)
    yield from _limits(where, who, parameters)
    yield from _decay(where, who, parameters)
    yield from out_of_range(where, who, algorithm, parameters)
    yield from _accumulators(where, who, message, index)
    yield from _packing(where, who, algorithm, parameters, table.dimension)
    yield from lost_in_float32(where, who, parameters, written)
    if algorithm in DOUBTS:
        yield finding(
            "PS216",
            f"{where}.{algorithm}",
            f"{who}: how '{algorithm}' updates on a TPU is not public in full: {DOUBTS[algorithm]}",
            "compare with a run of your own before you rely on equal results",
        )


def _rate(where: str, who: str, algorithm: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    place, rate = f"{where}.learning_rate.constant", parameters.learning_rate.constant
    constant = dynamic_tag(parameters) is None
    if algorithm == "frequency_estimator" and constant:
        yield finding(
            "PS217",
            place,
            f"{who}: frequency_estimator takes the step number for its learning rate, and this one is constant",
            "set learning_rate { dynamic { tag: … } }, and give the step as its value",
        )
    if not constant or rate > 0 or algorithm in WITHOUT_RATE | WITHOUT_FORMULA:
        return
    effect = "no update changes a weight by its gradient" if rate == 0 else "updates climb the loss"
    if rate == 0 and algorithm in DIVIDES_BY_RATE and not parameters.ftrl.multiply_linear_by_lr:
        effect = f"{algorithm} divides by it, which makes NaN of every touched row"
    yield finding(
        "PS207", place, f"{who}: learning rate is {rate:g}: {effect}", "set a constant above 0, or a dynamic tag"
    )


def _limits(where: str, who: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    for code, field in (("PS202", "clipping_limits"), ("PS203", "gradient_clipping_limits")):
        lower, upper = read_limits(getattr(parameters, field))
        if lower is not None and upper is not None and lower > upper:
            yield finding(
                code,
                f"{where}.{field}",
                f"{who}: lower {lower:g} is above upper {upper:g}, so every value becomes {upper:g}",
                "swap the limits",
            )
    if parameters.HasField("gradient_clipping_limits") and not accumulates(parameters):
        yield finding(
            "PS206",
            f"{where}.gradient_accumulation_status",
            f"{who}: gradients are clipped but not accumulated, so each part is clipped for itself",
            "set gradient_accumulation_status: ENABLED, or remove gradient_clipping_limits",
        )


def _decay(where: str, who: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    factor, times_rate = parameters.weight_decay_factor, parameters.multiply_weight_decay_factor_by_learning_rate
    if factor < 0 or (factor >= 1 and not times_rate):
        effect = "grows" if factor < 0 else "zeroes" if factor == 1 else "flips the sign of"
        yield finding(
            "PS204",
            f"{where}.weight_decay_factor",
            f"{who}: a decay factor of {factor:g} {effect} every touched weight (w becomes w - factor*w)",
            "use a small factor above 0, e.g. 0.0001",
        )
    if times_rate and factor == 0:
        yield finding(
            "PS205",
            f"{where}.multiply_weight_decay_factor_by_learning_rate",
            f"{who}: there is no weight_decay_factor to multiply",
            "set weight_decay_factor, or remove the flag",
        )
    if factor and not accumulates(parameters):
        yield finding(
            "PS215",
            f"{where}.gradient_accumulation_status",
            f"{who}: weights decay once for every part of a step, since gradients are not accumulated",
            "set gradient_accumulation_status: ENABLED, or remove weight_decay_factor",
        )


def _accumulators(where: str, who: str, message: EngineConfig, index: int) -> Iterator[Finding]:
    table = message.tpu_embedding_configuration.table_descriptor[index]
    start = initial_values(settings_of(message, table.name)).get("accumulators")
    ftrl = table.optimization_parameters.ftrl
    if not table.optimization_parameters.HasField("ftrl"):
        return
    if start == 0:
        place = next(i for i, settings in enumerate(message.table) if settings.name == table.name)
        yield finding(
            "PS209",
            f"table[{place}].slot",
            f"{who}: FTRL accumulators start at 0, so a row's first step is as large as its rate allows, "
            "however small the gradient; TensorFlow's classes refuse it",
            "start them at 0.1, TensorFlow's default",
        )
    elif ftrl.allow_zero_accumulator:
        yield finding(
            "PS209",
            f"{where}.ftrl.allow_zero_accumulator",
            f"{who}: allow_zero_accumulator has no effect (accumulators of 0 work without it), and the message says "
            f"nothing of how they start: here at {0.1 if start is None else start:g}",
            "remove it; initial values are set in an EngineConfig",
        )


def _packing(
    where: str, who: str, algorithm: str, parameters: OptimizationParameters, dimension: int
) -> Iterator[Finding]:
    if parameters.low_dimensional_packing_status != LowDimensionalPackingStatus.ENABLED:
        return
    place, fix = f"{where}.low_dimensional_packing_status", "remove it; results are the same with and without"
    if dimension not in PACKED_DIMENSIONS:
        why = f"only tables of dimension 1, 2 or 4 are packed, and this one has {dimension}"
    elif parameters.weight_decay_factor:
        why = "with weight decay a row that shares a chunk with a touched one would not stay as it is"
    elif algorithm not in ZERO_IS_NO_OP and not _proximal_without_penalty(parameters):
        why = f"a gradient of 0 is an update with {algorithm}, so untouched rows must not be next to touched ones"
    else:
        return
    yield finding("PS210", place, f"{who}: low-dimensional packing cannot take effect: {why}", fix)


def _proximal_without_penalty(parameters: OptimizationParameters) -> bool:
    own = parameters.proximal_adagrad
    return parameters.HasField("proximal_adagrad") and not own.l1 and not own.l2
