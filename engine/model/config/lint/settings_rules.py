"""The rules about the table, feature and gate settings of an EngineConfig that loading enforces, as findings.

proto_rules.py has the rules about the TPUEmbeddingConfiguration itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from penstock.base.errors import ConfigError
from penstock.model.config.clipping import norms_of, problems
from penstock.model.config.dynamic import read_dynamic
from penstock.model.config.engine_config_pb2 import (
    ClipSettings,
    EngineConfig,
    FeatureSettings,
    GateSettings,
    LimitSettings,
    TableSettings,
)
from penstock.model.config.lint.findings import Finding, Nearest, Subject, near
from penstock.model.config.placement import read_placement
from penstock.model.config.proto_views import TableMessage, set_numbers
from penstock.model.config.tables import COMBINERS
from penstock.model.frames import ROLES
from penstock.model.updates import OPTIMIZERS, OWN_OPTIMIZERS, Optimizer, UserDefinedProgram
from penstock.model.updates.optimizer_class import POSITIVE

SQUARES = {"accumulators", "velocities", "ms", "vs", "v", "updates", "sum", "exp_avg_sq"}


def broken_settings(message: EngineConfig, tables: Sequence[TableMessage]) -> Iterator[Finding]:
    """Yield a finding for every rule that the settings of ``message``, and of its tables, break."""
    yield from _table_settings(message, {table.name: table.algorithm for table in reversed(tables)})
    yield from _feature_settings(message)
    yield from _gate(message.gate)
    yield from _columns(message)
    if message.HasField("clip"):
        yield from _clip(message.clip)
    if message.HasField("limit"):
        yield from _limit(message.limit)


def _gate(message: GateSettings) -> Iterator[Finding]:
    gate = Subject("gate", "gate")
    if message.HasField("num_required"):
        yield from gate.below("PS020", message, "num_required", 1, "it must be at least 1")
    yield from gate.below("PS020", message, "max_staleness", 0, "it must be at least 0")
    yield from gate.unknown(message, "reduction", "use MEAN or SUM")
    if not message.HasField("rounds"):
        return
    subject, rounds = Subject("gate.rounds", "gate.rounds"), message.rounds
    for field in ("num_required", "max_staleness"):
        if message.HasField(field):
            yield gate.finding("PS020", field, f"{field} is given with rounds", "leave out one of them")
    if rounds.HasField("workers") == bool(rounds.names):
        yield subject.finding("PS020", "workers", "either workers or names is needed", "give one of them")
    elif rounds.HasField("workers"):
        yield from subject.below("PS020", rounds, "workers", 1, "it must be at least 1")
    elif len({*rounds.names}) < len(rounds.names) or "" in rounds.names:
        yield subject.finding("PS020", "names", "a name is empty or given twice", "give each worker one name")
    if rounds.HasField("ahead"):
        yield from subject.below("PS020", rounds, "ahead", 1, "it must be at least 1")


def _clip(message: ClipSettings) -> Iterator[Finding]:
    clip, given = Subject("clip", "clip"), norms_of(message)
    if not given:
        yield clip.finding("PS027", "", "has neither global_norm nor row_norm", "give a number above 0")
    for name, problem in problems(given):
        yield clip.finding("PS027", name, f"{name} is {problem}", "it must be a finite number above 0")


def _limit(message: LimitSettings) -> Iterator[Finding]:
    limit, given, fix = Subject("limit", "limit"), norms_of(message), "it must be a finite number of at least 1"
    if not given:
        yield limit.finding("PS027", "", "has no contributor_norm", "give a number of at least 1")
    for name, problem in problems(given, least=1):
        yield limit.finding("PS027", name, f"{name} is {problem}", fix)
    yield from limit.unknown(message, "action", "use CLIP or QUARANTINE")


def _columns(message: EngineConfig) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, column in enumerate(message.columns):
        subject = Subject(f"columns[{index}]", f"columns[{index}]")
        if column.role not in ROLES:
            fix = f"use one of {', '.join(ROLES)}"
            yield subject.finding("PS024", "role", f"role '{column.role}' does not exist", fix)
        elif column.role in seen:
            yield subject.finding("PS024", "role", f"role '{column.role}' is given twice", "give each role one column")
        if not column.name:
            yield subject.finding("PS024", "name", "name is empty", "give the name of the stream's column")
        seen.add(column.role)


def _table_settings(message: EngineConfig, algorithms: Mapping[str, str]) -> Iterator[Finding]:
    """Check the settings of tables. algorithms : by table"""
    seen: set[str] = set()
    nearest = Nearest(algorithms)
    for index, settings in enumerate(message.table):
        subject = Subject(f"table[{index}]", f"settings of table '{settings.name}'")
        if settings.name not in algorithms:
            yield subject.finding("PS015", "name", "no table has that name", nearest.to(settings.name))
            continue
        if settings.name in seen:
            yield subject.finding("PS016", "", "given twice", "put them into one table { }")
        seen.add(settings.name)
        yield from subject.unknown(settings, "storage_dtype", "use FLOAT32")
        yield from subject.unknown(settings, "on_gradient", "use DROP or REFUSE")
        yield from _frozen(subject, settings)
        yield from _initializer(subject, settings)
        yield from _optimizer(Subject(subject.path, f"table '{settings.name}'"), settings)
        yield from _slots(subject, settings, algorithms[settings.name])
        yield from _dynamic(subject, settings)
        yield from _placement(Subject(f"table[{index}].placement", f"placement of table '{settings.name}'"), settings)


def _frozen(subject: Subject, settings: TableSettings) -> Iterator[Finding]:
    given = {"on_gradient": bool(settings.on_gradient), "until_step": settings.HasField("until_step")}
    if settings.trainable or not settings.HasField("trainable"):
        for field in (field for field, is_given in given.items() if is_given):
            fix = "set trainable: false, or remove it"
            yield subject.finding("PS026", field, f"{field} is of a frozen table", fix)
    elif given["until_step"]:
        yield from subject.below("PS026", settings, "until_step", 1, "it must be at least 1")


def _initializer(subject: Subject, settings: TableSettings) -> Iterator[Finding]:
    chosen = settings.WhichOneof("initializer")
    if chosen is None:
        return
    message = getattr(settings, chosen)
    if chosen == "initial":
        if not getattr(message, "from"):
            yield subject.finding("PS017", "initial", "initial has no file", 'give one: initial { from: "FILE" }')
        return
    numbers = [getattr(message, field.name) for field in message.DESCRIPTOR.fields]
    if not all(math.isfinite(number) for number in numbers):
        yield subject.finding("PS017", chosen, f"{chosen} has a number that is not finite", "give a finite one")
    if chosen == "truncated_normal" and message.stddev < 0:
        yield subject.finding("PS017", chosen, f"stddev is {message.stddev}", "it cannot be negative")
    if chosen == "uniform" and message.min > message.max:
        yield subject.finding("PS017", chosen, f"uniform has min {message.min} > max {message.max}", "swap them")


def _optimizer(subject: Subject, settings: TableSettings) -> Iterator[Finding]:
    """Check the numbers of penstock's own optimizers: TensorFlow's messages may have any."""
    algorithm = settings.WhichOneof("optimizer")
    for name, value in {} if algorithm is None else set_numbers(getattr(settings, algorithm)).items():
        allowed, field = OPTIMIZERS[algorithm].range_of(name), f"{algorithm}.{name}"
        if allowed is not None and allowed.excludes(value):
            yield subject.finding("PS025", field, f"{field} is {value:g}", f"it must be {allowed.text}")


def _slots(subject: Subject, settings: TableSettings, algorithm: str) -> Iterator[Finding]:
    kind = OPTIMIZERS.get(algorithm, Optimizer)
    slots = kind.slot_names
    # The update divides by the square root of such a first slot: a 0 turns a row with gradient 0 into NaN. FTRL solves
    # for the weight and accepts 0, which lint reports.
    hyper_parameters = set_numbers(getattr(settings, algorithm)) if algorithm in OWN_OPTIMIZERS else {}
    divides = algorithm != "ftrl" and kind.first_slot_range(hyper_parameters) == POSITIVE
    if algorithm == UserDefinedProgram.parameters_field:
        slots = tuple(f"Slot_{index}" for index in range(len(settings.slot)))
    seen: set[str] = set()
    for index, slot in enumerate(settings.slot):
        if slot.name in seen:
            yield subject.finding("PS016", f"slot[{index}]", f"slot '{slot.name}' is given twice", "keep one")
        seen.add(slot.name)
    for index, slot in enumerate(settings.slot):
        field, start = f"slot[{index}]", slot.initial_value
        if not math.isfinite(start):
            yield subject.finding("PS018", field, f"slot '{slot.name}' starts at {start}", "it must be finite")
        elif algorithm in OPTIMIZERS and slot.name not in slots:
            yield subject.finding("PS018", field, f"{algorithm} has no slot '{slot.name}'", near(slot.name, slots))
        elif not slot.HasField("initial_value"):
            continue
        elif divides and slot.name == slots[0] and start <= 0:
            problem = f"initial_accumulator_value must be > 0, got {start}: the update divides by its root"
            own = algorithm in OWN_OPTIMIZERS
            fix = "use 0.1, the default, or set an epsilon" if own else "use 0.1, TensorFlow's default"
            yield subject.finding("PS018", field, problem, fix)
        elif slot.name in SQUARES and start < 0:
            problem = f"slot '{slot.name}' starts at {start}, but holds a mean or sum of squares"
            yield subject.finding("PS018", field, problem, "start it at 0 or above")


def _dynamic(subject: Subject, settings: TableSettings) -> Iterator[Finding]:
    try:
        read_dynamic(settings)
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        yield subject.finding("PS021", "dynamic", problem, fix or "see docs/dynamic.md for what every setting accepts")


def _placement(subject: Subject, settings: TableSettings) -> Iterator[Finding]:
    unknown = list(subject.unknown(settings.placement, "where", "use DEVICE, HOST or CACHED"))
    yield from unknown
    try:
        if not unknown:
            read_placement(settings)
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        field = problem.partition(" ")[0]
        yield subject.finding("PS022", field, problem, fix or "see docs/placement.md for what CACHED needs")


def _feature_settings(message: EngineConfig) -> Iterator[Finding]:
    features = message.tpu_embedding_configuration.feature_descriptor
    names = Counter(feature.name for feature in features)
    nearest = Nearest(filter(None, names))
    seen: set[str | int] = set()
    for index, settings in enumerate(message.feature):
        name, key, problem = _feature_of(settings, names, nearest, len(features))
        subject = Subject(f"feature[{index}]", name)
        if problem is not None:
            yield subject.finding("PS015", "", *problem)
            continue
        if key in seen:
            yield subject.finding("PS016", "", "given twice", "put them into one feature { }")
        seen.add(key)
        if settings.combiner and settings.combiner not in COMBINERS:
            problem = f"combiner is '{settings.combiner}'", near(settings.combiner, COMBINERS)
            yield subject.finding("PS019", "combiner", *problem)
        yield from subject.below("PS019", settings, "max_sequence_length", 0, "use 0 for none")


def _feature_of(
    settings: FeatureSettings, names: Counter[str], nearest: Nearest, number: int
) -> tuple[str, str | int, tuple[str, str] | None]:
    """Return the feature of the settings, a key to detect duplicates, and (problem, fix) if there is none."""
    if settings.HasField("feature_id"):
        name, problem = f"settings of feature_id {settings.feature_id}", None
        if settings.name:
            problem = (f"has the name '{settings.name}' too", "give one of the two")
        elif not 0 <= settings.feature_id < number:
            problem = ("there is no such feature", f"use one of 0 to {number - 1}")
        return name, settings.feature_id, problem
    name, problem = f"settings of feature '{settings.name}'", None
    if not settings.name or settings.name not in names:
        problem = ("no feature has that name", nearest.to(settings.name))
    elif names[settings.name] > 1:
        problem = ("several features have that name", "give them different names, or feature_id")
    return name, settings.name, problem
