"""Rules about single numbers of an optimizer: out of range, or changed in meaning by float32.

Ranges are those that TensorFlow's classes enforce for their optimizers, and the usual ones for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.config.lint.findings import Finding, finding
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizers import OPTIMIZERS, OWN_OPTIMIZERS
from penstock.config.optimizers.float32 import float32


class Range(NamedTuple):
    """The recommended range of a hyper-parameter: from ``low`` (excluded if open_low) to below ``high``."""

    low: float
    high: float
    open_low: bool
    text: str


SHARE = Range(0, 1, False, "at least 0 and below 1")
POSITIVE = Range(0, math.inf, True, "above 0")
NOT_NEGATIVE = Range(0, math.inf, False, "at least 0")
RANGES = {
    ("adagrad_momentum", "momentum"): SHARE,
    ("adagrad_momentum", "beta2"): Range(0, math.nextafter(1, 2), False, "at least 0 and at most 1"),
    ("adagrad_momentum", "epsilon"): POSITIVE,
    ("adagrad_momentum", "exponent"): POSITIVE,
    ("bounded_adagrad", "max_var_update"): NOT_NEGATIVE,
    ("bounded_adagrad", "max_accumulator"): NOT_NEGATIVE,
    ("proximal_adagrad", "l1"): NOT_NEGATIVE,
    ("proximal_adagrad", "l2"): NOT_NEGATIVE,
    ("ftrl", "l1"): NOT_NEGATIVE,
    ("ftrl", "l2"): NOT_NEGATIVE,
    ("ftrl", "beta"): NOT_NEGATIVE,
    ("ftrl", "lr_power"): Range(-math.inf, math.nextafter(0, 1), False, "at most 0"),
    ("adam", "beta1"): SHARE,
    ("adam", "beta2"): SHARE,
    ("adam", "epsilon"): POSITIVE,
    ("lion", "beta1"): SHARE,
    ("lion", "beta2"): SHARE,
    ("momentum", "momentum"): SHARE,
    ("rms_prop", "rho"): SHARE,
    ("rms_prop", "momentum"): SHARE,
    ("rms_prop", "epsilon"): POSITIVE,
    ("centered_rms_prop", "rho"): SHARE,
    ("centered_rms_prop", "momentum"): SHARE,
    ("centered_rms_prop", "epsilon"): POSITIVE,
    ("adadelta", "rho"): SHARE,
    ("adadelta", "epsilon"): POSITIVE,
    ("online_yogi", "l1"): NOT_NEGATIVE,
    ("online_yogi", "l2"): NOT_NEGATIVE,
    ("online_yogi", "beta2"): SHARE,
    ("proximal_yogi", "l1"): NOT_NEGATIVE,
    ("proximal_yogi", "l2"): NOT_NEGATIVE,
    ("proximal_yogi", "beta1"): SHARE,
    ("proximal_yogi", "beta2"): SHARE,
    ("proximal_yogi", "epsilon"): POSITIVE,
    ("frequency_estimator", "tau"): Range(0, 1, True, "above 0 and below 1"),
    ("frequency_estimator", "outlier_threshold"): NOT_NEGATIVE,
}

SMALLEST_NORMAL = 2.0**-126  # XLA flushes smaller float32 values to 0
LOST = 0.02  # largest relative error of 1 - x, the weight of a new value in a moving average


def _own_numbers(algorithm: str, parameters: OptimizationParameters) -> dict[str, float]:
    """Return the float fields of the optimizer's message, by name; empty for penstock's own optimizers."""
    if algorithm in OWN_OPTIMIZERS:
        return {}
    own = getattr(parameters, algorithm)
    return {name: getattr(own, name) for name, switch in OPTIMIZERS[algorithm].fields().items() if not switch}


def out_of_range(where: str, who: str, algorithm: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    """Yield findings about numbers of the optimizer's message that are outside their range."""
    for name, value in _own_numbers(algorithm, parameters).items():
        allowed = RANGES.get((algorithm, name))
        if allowed is None:
            continue
        if value < allowed.low or value >= allowed.high or (allowed.open_low and value == allowed.low):
            yield finding(
                "PS212",
                f"{where}.{algorithm}.{name}",
                f"{who}: {algorithm}.{name} is {value:g}",
                f"it should be {allowed.text}",
            )


def lost_in_float32(
    where: str, who: str, parameters: OptimizationParameters, written: Mapping[str, float]
) -> Iterator[Finding]:
    """Yield findings about numbers whose meaning float32 changes. Rounding alone is no finding: most are rounded."""
    for path, number in written.items():
        if not path.startswith(f"{where}."):
            continue
        field, rounded = path.removeprefix(f"{where}."), float32(number)
        member, _, name = field.partition(".")
        fix = "write a number that float32 can hold"
        if math.isinf(rounded) and math.isfinite(number):
            effect = f"is too large for float32, and becomes {rounded}"
        elif number and abs(rounded) < SMALLEST_NORMAL:
            effect = "is too small for float32, and counts as 0"
        elif (
            RANGES.get((member, name)) is SHARE
            and 0 < number < 1
            and abs(1 - rounded - (1 - number)) > LOST * (1 - number)
        ):
            effect = f"becomes {rounded!r} in float32, so 1 - {name} is {1 - rounded:.3g} and not {1 - number:.3g}"
            fix = "write a number further from 1"
        else:
            continue
        yield finding("PS211", path, f"{who}: {field} = {number!r} {effect}", fix)
    epsilon = parameters.adam.epsilon
    if parameters.adam.use_sum_inside_sqrt and epsilon and epsilon * epsilon < SMALLEST_NORMAL:
        yield finding(
            "PS211",
            f"{where}.adam.epsilon",
            f"{who}: adam.epsilon is {epsilon:g}, and its square, which use_sum_inside_sqrt adds, counts as 0",
            "use an epsilon above 1.1e-19, or unset use_sum_inside_sqrt",
        )
