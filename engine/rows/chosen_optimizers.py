"""The optimizers of a source's states, for a configuration that leaves them to an import: those of torch and torchrec.

torch saves an optimizer's numbers with its states, and no class. So the names and shapes of slots decide: ``sum``, or
``momentum1`` alone, is Adagrad's; ``exp_avg_sq`` or ``momentum2`` of one number per row is partially row-wise Adam's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.io.table_formats.table_format import NO_STATE, Contents, OptimizerState, format_of, joined_contents
from penstock.io.table_formats.tensor_names import ANY_OF_TORCH, WantedTable, assign
from penstock.model.config import text_format
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import DynamicSettings, EngineConfig
from penstock.model.config.proto_views import TableMessage, table_messages
from penstock.model.config.specs import WEIGHTS
from penstock.model.updates import (
    OPTIMIZERS,
    DynamicLearningRate,
    LearningRate,
    Optimizer,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    TorchAdagrad,
)

# torch's names of numbers, and those of the optimizers here.
_NUMBERS = {"lr_decay": "lr_decay", "eps": "epsilon", "betas.0": "beta1", "betas.1": "beta2"}
_EVERY_SLOT = sorted({slot for optimizer in OPTIMIZERS.values() for slot in optimizer.slot_names})


def with_chosen_optimizers(
    path: str | os.PathLike[str], sources: Sequence[Path], names: Mapping[str, str]
) -> tuple[EmbeddingConfig, dict[str, Optimizer]]:
    """Return a configuration with the optimizers of torch's states in sources, and these optimizers, by table.

    path : of the configuration, whose tables need no optimizer and no rate if the sources have them
    names : as for ``assign``
    Raises ConfigError, InputError, UsageError.
    """
    message, _ = text_format.read(path)
    formats, chosen = {source: format_of(source) for source in sources}, dict[str, Optimizer]()
    if all(each.contents is not None for each in formats.values()):  # Parquet is penstock's
        with ExitStack() as stack:
            contents = joined_contents(formats, stack)
            chosen = _chosen(contents, table_messages(message), names, ", ".join(map(str, sources)))
    for table in table_messages(message):
        if table.name in chosen:
            _write(message, table, chosen[table.name])
    try:
        return EmbeddingConfig.from_proto(message), chosen
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _chosen(
    contents: Contents, tables: Sequence[TableMessage], names: Mapping[str, str], source: str
) -> dict[str, Optimizer]:
    wanted = {table.name: _wanted(table) for table in tables}
    assigned = assign(contents, wanted, names, source, checked=False)
    chosen = {}
    for table in tables:
        parts = assigned.parts.get(table.name, {})
        shapes = {part: contents.tensors[name].shape for part, name in parts.items()}
        is_fused = "momentum" in parts.get("sum", "")
        states = [contents.states[name] for part, name in parts.items() if part != WEIGHTS and name in contents.states]
        optimizer = _optimizer(table, shapes, is_fused, states[0] if states else NO_STATE)
        if optimizer is not None:
            chosen[table.name] = optimizer
    return chosen


def _wanted(table: TableMessage) -> WantedTable:
    dim, dynamic = table.descriptor.dimension, table.settings.HasField("dynamic")
    key_type = DynamicSettings.KeyType.Name(table.settings.dynamic.key_type).lower() if dynamic else None
    num_rows = None if dynamic else table.descriptor.vocabulary_size
    return WantedTable(table.name, ANY_OF_TORCH, dict.fromkeys((WEIGHTS, *_EVERY_SLOT), dim), num_rows, key_type)


def _optimizer(
    table: TableMessage, shapes: Mapping[str, Any], is_fused: bool, state: OptimizerState
) -> Optimizer | None:
    """Return the optimizer of torch that has slots of such shapes; None: none that is here.

    is_fused : the names are FBGEMM's, whose epsilon is another than torch's
    """
    settings, dim = state.settings, table.descriptor.dimension
    of_rows = {part for part, shape in shapes.items() if len(shape) == 1 or (shape[1:] == (1,) and dim > 1)}
    numbers: dict[str, Any] = {}
    if "exp_avg_sq" in shapes:
        if "exp_avg_sq" not in of_rows:
            return None
        kind: Any = PartialRowWiseAdam
    elif "sum" not in shapes:
        return None
    elif "sum" in of_rows:
        kind, numbers = RowWiseAdagrad, {"initial_accumulator_value": 0.0, "epsilon": 1e-8}
    else:
        kind, numbers = TorchAdagrad, {"epsilon": 1e-8} if is_fused else {}
    fields = kind.fields()
    numbers |= {ours: settings[theirs] for theirs, ours in _NUMBERS.items() if theirs in settings and ours in fields}
    try:
        optimizer: Optimizer = kind(**numbers, learning_rate=_rate(table, settings))
    except ConfigError as error:
        raise ConfigError(f"table '{table.name}': {error}") from None
    return optimizer


def _rate(table: TableMessage, settings: Mapping[str, float]) -> LearningRate:
    """Return the rate of a table: that of the state, but a dynamic one stays. Raises ConfigError if there is none."""
    rate = table.parameters.learning_rate
    if table.tag is not None:
        return DynamicLearningRate(table.tag)
    if "lr" in settings:
        return settings["lr"]
    if rate.WhichOneof("learning_rate") is None:
        raise ConfigError("the source has no learning rate; set learning_rate { constant: … } or { dynamic { } }")
    return rate.constant


def _write(message: EngineConfig, table: TableMessage, optimizer: Optimizer) -> None:
    """Replace the optimizer of a table."""
    parameters, settings = table.parameters, table.settings
    if (before := parameters.WhichOneof("parameters")) is not None:
        parameters.ClearField(before)
    if table.settings_index is None:
        settings = message.table.add(name=table.name)
    if (own := settings.WhichOneof("optimizer")) is not None:
        settings.ClearField(own)
    optimizer.write_parameters(settings)
    del settings.slot[:]
    defaults = dict(type(optimizer)().slots())
    for slot, start in optimizer.slots():
        if start != defaults[slot]:
            settings.slot.add(name=slot, initial_value=start)
    if isinstance(optimizer.learning_rate, float):
        parameters.learning_rate.constant = optimizer.learning_rate
