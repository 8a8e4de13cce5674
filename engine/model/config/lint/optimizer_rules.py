"""Rules about one table's optimization parameters that are legal and can be run, but look like a mistake.

runnable.py reports parameters that cannot be run, proto_rules.py those that loading refuses; number_rules.py has the
rules about single numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.model.config.lint.findings import Finding, Subject, subject_of_parameters
from penstock.model.config.lint.number_rules import lost_in_float32, out_of_range
from penstock.model.config.optimization_parameters_pb2 import LowDimensionalPackingStatus
from penstock.model.config.proto_views import TableMessage, read_limits
from penstock.model.updates import OPTIMIZERS

PACKED_DIMENSIONS = (1, 2, 4)


def lint_table(table: TableMessage, written: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the findings about one table of a valid message.

    written : path below the table's optimization parameters -> number as written, before float32
    """
    subject = subject_of_parameters(table)
    yield from _rate(subject, table)
    yield from _limits(subject, table)
    yield from _decay(subject, table)
    yield from out_of_range(subject, table)
    yield from _accumulators(subject, table)
    yield from _packing(subject, table)
    yield from lost_in_float32(subject, table, written)
    if doubt := OPTIMIZERS[table.algorithm].doubt:
        yield subject.finding(
            "PS216",
            table.algorithm,
            f"how '{table.algorithm}' updates on a TPU is not public in full: {doubt}",
            "compare with a run of your own before you rely on equal results",
        )


def _rate(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    algorithm, rate = table.algorithm, table.parameters.learning_rate.constant
    optimizer = OPTIMIZERS[algorithm]
    if table.tag is not None:
        return
    if algorithm == "frequency_estimator":
        yield subject.finding(
            "PS217",
            "learning_rate.constant",
            "frequency_estimator takes the step number for its learning rate, and this one is constant",
            "set learning_rate { dynamic { tag: … } }, and give the step as its value",
        )
    if rate > 0 or not optimizer.scaled_by_rate or not optimizer.has_formula():
        return
    effect = "no update changes a weight by its gradient" if rate == 0 else "updates climb the loss"
    if rate == 0 and optimizer.divides_by_rate and not table.parameters.ftrl.multiply_linear_by_lr:
        effect = f"{algorithm} divides by it, which makes NaN of every touched row"
    problem, fix = f"learning rate is {rate:g}: {effect}", "set a constant above 0, or a dynamic tag"
    yield subject.finding("PS207", "learning_rate.constant", problem, fix)


def _limits(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    for code, field in (("PS202", "clipping_limits"), ("PS203", "gradient_clipping_limits")):
        lower, upper = read_limits(getattr(table.parameters, field))
        if lower is not None and upper is not None and lower > upper:
            problem = f"lower {lower:g} is above upper {upper:g}, so every value becomes {upper:g}"
            yield subject.finding(code, field, problem, "swap the limits")
    if table.parameters.HasField("gradient_clipping_limits") and not table.accumulates:
        yield subject.finding(
            "PS206",
            "gradient_accumulation_status",
            "gradients are clipped but not accumulated, so each part is clipped for itself",
            "set gradient_accumulation_status: ENABLED, or remove gradient_clipping_limits",
        )


def _decay(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    factor = table.parameters.weight_decay_factor
    times_rate = table.parameters.multiply_weight_decay_factor_by_learning_rate
    if factor < 0 or (factor >= 1 and not times_rate):
        effect = "grows" if factor < 0 else "zeroes" if factor == 1 else "flips the sign of"
        yield subject.finding(
            "PS204",
            "weight_decay_factor",
            f"a decay factor of {factor:g} {effect} every touched weight (w becomes w - factor*w)",
            "use a small factor above 0, e.g. 0.0001",
        )
    if times_rate and factor == 0:
        yield subject.finding(
            "PS205",
            "multiply_weight_decay_factor_by_learning_rate",
            "there is no weight_decay_factor to multiply",
            "set weight_decay_factor, or remove the flag",
        )
    if factor and not table.accumulates:
        yield subject.finding(
            "PS215",
            "gradient_accumulation_status",
            "weights decay once for every part of a step, since gradients are not accumulated",
            "set gradient_accumulation_status: ENABLED, or remove weight_decay_factor",
        )


def _accumulators(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    if table.algorithm != "ftrl":
        return
    start = table.initial_values.get("accumulators")
    if start == 0:
        yield Subject(f"table[{table.settings_index}]", subject.name).finding(
            "PS209",
            "slot",
            "FTRL accumulators start at 0, so a row's first step is as large as its rate allows, "
            "however small the gradient; TensorFlow's classes refuse it",
            "start them at 0.1, TensorFlow's default",
        )
    elif table.parameters.ftrl.allow_zero_accumulator:
        yield subject.finding(
            "PS209",
            "ftrl.allow_zero_accumulator",
            "allow_zero_accumulator has no effect (accumulators of 0 work without it), and the message says "
            f"nothing of how they start: here at {0.1 if start is None else start:g}",
            "remove it; initial values are set in an EngineConfig",
        )


def _packing(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    parameters, dimension = table.parameters, table.descriptor.dimension
    if parameters.low_dimensional_packing_status != LowDimensionalPackingStatus.ENABLED:
        return
    if dimension not in PACKED_DIMENSIONS:
        why = f"only tables of dimension 1, 2 or 4 are packed, and this one has {dimension}"
    elif parameters.weight_decay_factor:
        why = "with weight decay a row that shares a chunk with a touched one would not stay as it is"
    elif not OPTIMIZERS[table.algorithm].zero_is_no_op and not _proximal_without_penalty(table):
        why = f"a gradient of 0 is an update with {table.algorithm}, so untouched rows must not be next to touched ones"
    else:
        return
    problem, fix = "low-dimensional packing cannot take effect", "remove it; results are the same with and without"
    yield subject.finding("PS210", "low_dimensional_packing_status", f"{problem}: {why}", fix)


def _proximal_without_penalty(table: TableMessage) -> bool:
    penalties = table.parameters.proximal_adagrad
    return table.algorithm == "proximal_adagrad" and not penalties.l1 and not penalties.l2
