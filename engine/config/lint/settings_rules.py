"""The rules about the table, feature and gate settings of an EngineConfig that loading enforces, as findings.

proto_rules.py has the rules about the TPUEmbeddingConfiguration itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from penstock.config.engine_config_pb2 import EngineConfig, FeatureSettings, GateSettings, TableSettings
from penstock.config.lint.findings import Finding, finding, near
from penstock.config.optimizers import OPTIMIZERS, UserDefinedProgram
from penstock.config.optimizers.proto_conversion import algorithm_of
from penstock.config.tables import COMBINERS

# The update divides by the square root of these slots: a 0 turns a row with gradient 0 into NaN. FTRL solves for the
# weight and accepts 0, which lint reports.
DIVISORS = {
    ("adagrad", "accumulators"),
    ("bounded_adagrad", "accumulators"),
    ("proximal_adagrad", "accumulators"),
    ("row_wise_adagrad", "accumulators"),
}
SQUARES = {"accumulators", "velocities", "ms", "vs", "v", "updates"}


def broken_settings(message: EngineConfig) -> Iterator[Finding]:
    """Yield a finding for every rule that the settings of ``message`` break."""
    yield from _table_settings(message)
    yield from _feature_settings(message)
    yield from _gate(message.gate)


def _table_settings(message: EngineConfig) -> Iterator[Finding]:
    names = [table.name for table in message.tpu_embedding_configuration.table_descriptor]
    seen: set[str] = set()
    for index, settings in enumerate(message.table):
        where, who = f"table[{index}]", f"settings of table '{settings.name}'"
        if settings.name not in names:
            yield finding("PS015", f"{where}.name", f"{who}: no table has that name", near(settings.name, names))
            continue
        if settings.name in seen:
            yield finding("PS016", where, f"{who}: given twice", "put them into one table { }")
        seen.add(settings.name)
        if settings.storage_dtype not in TableSettings.StorageDtype.values():
            yield finding(
                "PS011",
                f"{where}.storage_dtype",
                f"{who}: storage_dtype is {settings.storage_dtype}",
                "use FLOAT32",
            )
        yield from _initializer(where, who, settings)
        yield from _slots(where, who, settings, algorithm_of(message, names.index(settings.name)) or "")


def _initializer(where: str, who: str, settings: TableSettings) -> Iterator[Finding]:
    chosen = settings.WhichOneof("initializer")
    if chosen is None:
        return
    message, where = getattr(settings, chosen), f"{where}.{chosen}"
    numbers = [getattr(message, field.name) for field in message.DESCRIPTOR.fields]
    if not all(math.isfinite(number) for number in numbers):
        yield finding("PS017", where, f"{who}: {chosen} has a number that is not finite", "give a finite one")
    if chosen == "truncated_normal" and settings.truncated_normal.stddev < 0:
        yield finding("PS017", where, f"{who}: stddev is {settings.truncated_normal.stddev}", "it cannot be negative")
    if chosen == "uniform" and settings.uniform.min > settings.uniform.max:
        yield finding(
            "PS017",
            where,
            f"{who}: uniform has min {settings.uniform.min} > max {settings.uniform.max}",
            "swap them",
        )


def _slots(where: str, who: str, settings: TableSettings, algorithm: str) -> Iterator[Finding]:
    known = OPTIMIZERS[algorithm].slot_names if algorithm in OPTIMIZERS else ()
    if algorithm == UserDefinedProgram.parameters_field:
        known = tuple(f"Slot_{index}" for index in range(len(settings.slot)))
    seen: set[str] = set()
    for index, slot in enumerate(settings.slot):
        if slot.name in seen:
            yield finding("PS016", f"{where}.slot[{index}]", f"{who}: slot '{slot.name}' is given twice", "keep one")
        seen.add(slot.name)
    for index, slot in enumerate(settings.slot):
        place, start = f"{where}.slot[{index}]", slot.initial_value
        if not math.isfinite(start):
            yield finding("PS018", place, f"{who}: slot '{slot.name}' starts at {start}", "it must be finite")
        elif algorithm in OPTIMIZERS and slot.name not in known:
            yield finding("PS018", place, f"{who}: {algorithm} has no slot '{slot.name}'", near(slot.name, known))
        elif not slot.HasField("initial_value"):
            continue
        elif (algorithm, slot.name) in DIVISORS and start <= 0:
            yield finding(
                "PS018",
                place,
                f"{who}: initial_accumulator_value must be > 0, got {start}: the update divides by its root",
                "use 0.1, TensorFlow's default",
            )
        elif slot.name in SQUARES and start < 0:
            yield finding(
                "PS018",
                place,
                f"{who}: slot '{slot.name}' starts at {start}, but holds a mean or sum of squares",
                "start it at 0 or above",
            )


def _feature_settings(message: EngineConfig) -> Iterator[Finding]:
    features = message.tpu_embedding_configuration.feature_descriptor
    names = Counter(feature.name for feature in features)
    seen: set[str | int] = set()
    for index, settings in enumerate(message.feature):
        where = f"feature[{index}]"
        who, key, problem = _meant(settings, names, len(features))
        if problem is not None:
            yield finding("PS015", where, f"{who}: {problem[0]}", problem[1])
            continue
        if key in seen:
            yield finding("PS016", where, f"{who}: given twice", "put them into one feature { }")
        seen.add(key)
        if settings.combiner and settings.combiner not in COMBINERS:
            yield finding(
                "PS019",
                f"{where}.combiner",
                f"{who}: combiner is '{settings.combiner}'",
                near(settings.combiner, COMBINERS),
            )
        if settings.max_sequence_length < 0:
            yield finding(
                "PS019",
                f"{where}.max_sequence_length",
                f"{who}: max_sequence_length is {settings.max_sequence_length}",
                "use 0 for none",
            )


def _meant(
    settings: FeatureSettings, names: Counter[str], number: int
) -> tuple[str, str | int, tuple[str, str] | None]:
    """Return the table or feature of the settings, a key to detect duplicates, and (problem, fix) if there is none."""
    if settings.HasField("feature_id"):
        who, problem = f"settings of feature_id {settings.feature_id}", None
        if settings.name:
            problem = (f"has the name '{settings.name}' too", "give one of the two")
        elif not 0 <= settings.feature_id < number:
            problem = ("there is no such feature", f"use one of 0 to {number - 1}")
        return who, settings.feature_id, problem
    who, problem = f"settings of feature '{settings.name}'", None
    if not settings.name or settings.name not in names:
        problem = ("no feature has that name", near(settings.name, filter(None, names)))
    elif names[settings.name] > 1:
        problem = ("several features have that name", "name them apart, or say feature_id")
    return who, settings.name, problem


def _gate(gate: GateSettings) -> Iterator[Finding]:
    if gate.HasField("num_required") and gate.num_required < 1:
        yield finding(
            "PS020", "gate.num_required", f"gate: num_required is {gate.num_required}", "it must be at least 1"
        )
    if gate.reduction not in GateSettings.Reduction.values():
        yield finding("PS011", "gate.reduction", f"gate: reduction is {gate.reduction}", "use MEAN or SUM")
