"""Findings about tables of a legal configuration that this version cannot run; their severity is error.

Loading keeps such tables and saving writes them. Lint reports these findings, and requesting the table's spec raises
the first as a ConfigError. proto_rules.py has the rules that loading enforces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.model.config.engine_config_pb2 import PlacementSettings, TableSettings
from penstock.model.config.lint.findings import Finding, Subject, subject_of_parameters
from penstock.model.config.proto_views import TableMessage, read_limits
from penstock.model.updates import OPTIMIZERS, WITHOUT_FORMULA, UserDefinedProgram


def refusals(table: TableMessage, programs: Collection[str]) -> Iterator[Finding]:
    """Yield the reasons why a table cannot be run; none if it can.

    programs : the tables that have a Python program
    """
    subject = subject_of_parameters(table)
    yield from _storage(Subject(f"table[{table.settings_index}]", subject.name), table)
    yield from _algorithm(subject, table.algorithm, table.name in programs)
    yield from _untouched(subject, table)
    yield from _replaced(Subject(f"table[{table.settings_index}]", subject.name), table)
    yield from _numbers(subject, table)
    yield from _quantization(subject, table)
    yield from _size(subject, table)


def _storage(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    dtype = table.settings.storage_dtype
    if dtype == TableSettings.INT32:
        yield subject.finding(
            "PS105",
            "storage_dtype",
            f"storage_dtype {TableSettings.StorageDtype.Name(dtype)} is not supported (supported: FLOAT32, BFLOAT16)",
            "remove storage_dtype, or set it to FLOAT32 or BFLOAT16",
        )


def _algorithm(subject: Subject, algorithm: str, has_program: bool) -> Iterator[Finding]:
    if algorithm in WITHOUT_FORMULA:
        yield subject.finding(
            "PS201",
            algorithm,
            f"optimizer '{algorithm}' cannot be run: TensorFlow publishes its fields, but no formula "
            "that could be followed",
            "use another optimizer, e.g. adagrad; loading and saving keep this one as it is",
        )
    if algorithm == UserDefinedProgram.parameters_field and not has_program:
        yield subject.finding(
            "PS201",
            algorithm,
            "the program of a file is XLA's own form, which is kept but not run",
            "build the configuration in Python, with UserDefinedProgram(program)",
        )


def _numbers(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    algorithm, numbers = table.algorithm, table.hyper_parameters
    if algorithm == "adagrad_momentum" and numbers["exponent"] == 0:
        yield subject.finding(
            "PS214",
            "adagrad_momentum.exponent",
            "adagrad_momentum.exponent is 0, and the update takes the power -1/exponent",
            "set exponent: 2, TensorFlow's default",
        )
    if algorithm == "frequency_estimator" and numbers["max_delta"] <= 0:
        yield subject.finding(
            "PS214",
            "frequency_estimator.max_delta",
            f"frequency_estimator.max_delta is {numbers['max_delta']:g}: no distance between two hits of a row fits",
            "set it to the largest number of steps to tell apart, e.g. 1000",
        )


def _quantization(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    simulated = table.parameters.simulated_quantization
    if not simulated.enabled:
        return
    lower, upper = read_limits(simulated.clipping_limits)
    if simulated.num_buckets < 2:
        yield subject.finding(
            "PS213",
            "simulated_quantization.num_buckets",
            f"simulated quantization to {simulated.num_buckets} buckets",
            "set num_buckets to at least 2",
        )
    if lower is None or upper is None or not lower < upper:
        yield subject.finding(
            "PS213",
            "simulated_quantization.clipping_limits",
            f"simulated quantization between {lower} and {upper} has no range to divide",
            "set both limits, lower below upper",
        )


def _untouched(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    """Yield findings about an update of every row once a step, where that is impossible."""
    non_lazy, settings = OPTIMIZERS[table.algorithm].non_lazy_field, table.settings
    if table.is_never_trained or non_lazy is None or not table.hyper_parameters[non_lazy]:
        return
    problems = {}
    if not table.accumulates:
        fix = f"set gradient_accumulation_status: ENABLED, or remove {non_lazy}"
        problems["PS208"] = "which needs gradient accumulation", fix
    if settings.HasField("dynamic"):
        fix = f"remove {non_lazy}, or the table's dynamic settings"
        problems["PS218"] = "but absent keys of a dynamic table have no row", fix
    if settings.placement.where == PlacementSettings.CACHED:
        fix = f"place the table on DEVICE or HOST, or remove {non_lazy}"
        problems["PS219"] = "but only some rows of a CACHED table are on the devices", fix
    for code, (reason, fix) in problems.items():
        problem = f"{non_lazy} updates every row once a step, {reason}"
        yield subject.finding(code, f"{table.algorithm}.{non_lazy}", problem, fix)


def _replaced(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    slot = OPTIMIZERS[table.algorithm].derived_slot
    if slot is not None and table.settings.WhichOneof("initializer") == "initial" and not table.is_never_trained:
        yield subject.finding(
            "PS220",
            "initial",
            f"{table.algorithm} computes weights from its '{slot}', so the first update of a row would replace its "
            "initial vector",
            "use another optimizer, or load the vectors with --init or Engine.load_parameters, which set that slot too",
        )


def _size(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    if table.settings.HasField("dynamic") and table.descriptor.vocabulary_size >= 2**31:
        descriptor = Subject(f"table_descriptor[{table.index}]", subject.name)
        yield descriptor.finding(
            "PS218",
            "vocabulary_size",
            f"vocabulary_size is {table.descriptor.vocabulary_size}, but a dynamic table has at most {2**31 - 1} rows",
            "set it to the number of keys that have a row at once",
        )
