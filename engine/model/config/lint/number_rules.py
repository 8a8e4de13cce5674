"""Rules about single numbers of an optimizer: out of range, or changed in meaning by float32.

The optimizer classes have the ranges: those that TensorFlow's classes enforce, and the usual ones for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from penstock.model.config.lint.findings import Finding, Subject
from penstock.model.config.proto_views import TableMessage
from penstock.model.updates import OPTIMIZERS
from penstock.model.updates.optimizer_class import SHARE
from penstock.model.updates.rule import float32

SMALLEST_NORMAL = 2.0**-126  # XLA flushes smaller float32 values to 0
LOST = 0.02  # largest relative error of 1 - x, the weight of a new value in a moving average


def out_of_range(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    """Yield findings about numbers of the optimizer's message that are outside their range."""
    algorithm = table.algorithm
    for name, value in table.hyper_parameters.items():
        allowed = OPTIMIZERS[algorithm].range_of(name)
        # runnable.py reports a max_delta that no update can use.
        if allowed is not None and allowed.excludes(value) and name != "max_delta":
            field = f"{algorithm}.{name}"
            yield subject.finding("PS212", field, f"{field} is {value:g}", f"it should be {allowed.text}")


def lost_in_float32(subject: Subject, table: TableMessage, written: Mapping[str, float]) -> Iterator[Finding]:
    """Yield findings about numbers whose meaning float32 changes. Rounding alone is no finding: most are rounded."""
    for field, number in written.items():
        rounded = float32(number)
        member, _, name = field.partition(".")
        is_share = member in OPTIMIZERS and OPTIMIZERS[member].range_of(name) is SHARE
        fix = "write a number that float32 can hold"
        if math.isinf(rounded) and math.isfinite(number):
            effect = f"is too large for float32, and becomes {rounded}"
        elif number and abs(rounded) < SMALLEST_NORMAL:
            effect = "is too small for float32, and counts as 0"
        elif is_share and 0 < number < 1 and abs(1 - rounded - (1 - number)) > LOST * (1 - number):
            effect = f"becomes {rounded!r} in float32, so 1 - {name} is {1 - rounded:.3g} and not {1 - number:.3g}"
            fix = "write a number further from 1"
        else:
            continue
        yield subject.finding("PS211", field, f"{field} = {number!r} {effect}", fix)
    adam = table.parameters.adam
    if adam.use_sum_inside_sqrt and adam.epsilon and adam.epsilon * adam.epsilon < SMALLEST_NORMAL:
        yield subject.finding(
            "PS211",
            "adam.epsilon",
            f"adam.epsilon is {adam.epsilon:g}, and its square, which use_sum_inside_sqrt adds, counts as 0",
            "use an epsilon above 1.1e-19, or unset use_sum_inside_sqrt",
        )
