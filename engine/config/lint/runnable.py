"""Findings about tables of a legal configuration that this version cannot run; their severity is error.

Loading keeps such tables and saving writes them. Lint reports these findings, and requesting the table's spec raises
the first as a ConfigError. proto_rules.py has the rules that loading enforces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.config.engine_config_pb2 import EngineConfig, TableSettings
from penstock.config.lint.findings import Finding, finding
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizers import WITHOUT_FORMULA, UserDefinedProgram
from penstock.config.optimizers.proto_conversion import accumulates, algorithm_of, read_limits, settings_of

NON_LAZY = (("adam", "use_non_lazy_adam"), ("lion", "use_non_lazy_lion"))


def refusals(message: EngineConfig, index: int, programs: Collection[str]) -> Iterator[Finding]:
    """Yield the reasons why table ``index`` cannot be run; none if it can.

    programs : the tables that have a Python program
    """
    table = message.tpu_embedding_configuration.table_descriptor[index]
    where = f"table_descriptor[{index}].optimization_parameters"
    who, parameters = f"table '{table.name}'", table.optimization_parameters
    yield from _storage(message, who, table.name)
    yield from _algorithm(where, who, algorithm_of(message, index) or "", table.name in programs)
    yield from _numbers(where, who, parameters)
    yield from _quantization(where, who, parameters)


def _storage(message: EngineConfig, who: str, name: str) -> Iterator[Finding]:
    dtype = settings_of(message, name).storage_dtype
    if dtype != TableSettings.INT32:
        return
    index = next(index for index, settings in enumerate(message.table) if settings.name == name)
    yield finding(
        "PS105",
        f"table[{index}].storage_dtype",
        f"{who}: storage_dtype {TableSettings.StorageDtype.Name(dtype)} is not yet supported by this version "
        "(supported: FLOAT32, BFLOAT16)",
        "remove storage_dtype, or set it to FLOAT32 or BFLOAT16",
    )


def _algorithm(where: str, who: str, algorithm: str, has_program: bool) -> Iterator[Finding]:
    if algorithm in WITHOUT_FORMULA:
        yield finding(
            "PS201",
            f"{where}.{algorithm}",
            f"{who}: optimizer '{algorithm}' cannot be run: TensorFlow publishes its fields, but no formula "
            "that could be followed",
            "use another optimizer, e.g. adagrad; loading and saving keep this one as it is",
        )
    if algorithm == UserDefinedProgram.parameters_field and not has_program:
        yield finding(
            "PS201",
            f"{where}.{algorithm}",
            f"{who}: the program of a file is XLA's own form, which is kept but not run",
            "build the configuration in Python, with UserDefinedProgram(program)",
        )


def _numbers(where: str, who: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    for algorithm, switch in NON_LAZY:
        if getattr(getattr(parameters, algorithm), switch) and not accumulates(parameters):
            yield finding(
                "PS208",
                f"{where}.{algorithm}.{switch}",
                f"{who}: {switch} updates every row once a step, which needs gradient accumulation",
                f"set gradient_accumulation_status: ENABLED, or remove {switch}",
            )
    if parameters.HasField("adagrad_momentum") and parameters.adagrad_momentum.exponent == 0:
        yield finding(
            "PS214",
            f"{where}.adagrad_momentum.exponent",
            f"{who}: adagrad_momentum.exponent is 0, and the update takes the power -1/exponent",
            "set exponent: 2, TensorFlow's default",
        )
    if parameters.HasField("frequency_estimator") and parameters.frequency_estimator.max_delta <= 0:
        yield finding(
            "PS214",
            f"{where}.frequency_estimator.max_delta",
            f"{who}: frequency_estimator.max_delta is {parameters.frequency_estimator.max_delta:g}: no distance "
            "between two hits of a row fits",
            "set it to the largest number of steps to tell apart, e.g. 1000",
        )


def _quantization(where: str, who: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    simulated = parameters.simulated_quantization
    if not simulated.enabled:
        return
    lower, upper = read_limits(simulated.clipping_limits)
    where += ".simulated_quantization"
    if simulated.num_buckets < 2:
        yield finding(
            "PS213",
            f"{where}.num_buckets",
            f"{who}: simulated quantization to {simulated.num_buckets} buckets",
            "set num_buckets to at least 2",
        )
    if lower is None or upper is None or not lower < upper:
        yield finding(
            "PS213",
            f"{where}.clipping_limits",
            f"{who}: simulated quantization between {lower} and {upper} has no range to divide",
            "set both limits, lower below upper",
        )
