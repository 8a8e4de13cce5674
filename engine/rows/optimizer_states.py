"""What an imported state of torch's optimizers asks of the configuration: the step to begin at, and equal numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.io.table_formats.table_format import OptimizerState
from penstock.model.config.specs import TableSpec
from penstock.model.updates import Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad, TorchAdagrad
from penstock.model.updates.rule import float32


class _Kind(NamedTuple):
    """An optimizer of torch, and torchrec's row-wise one of the same settings.

    numbers : what continues it, the first by default → torch's names of its numbers → the arguments here
    """

    title: str
    numbers: Mapping[type[Optimizer], Mapping[str, str]]


# By a setting that no other optimizer has.
_KINDS = {
    "lr_decay": _Kind(
        "Adagrad",
        {
            TorchAdagrad: {"lr": "learning_rate", "lr_decay": "lr_decay", "eps": "epsilon"},
            RowWiseAdagrad: {"lr": "learning_rate", "eps": "epsilon"},
        },
    ),
    "betas.0": _Kind(
        "Adam",
        {
            Adam: {"betas.0": "beta_1", "betas.1": "beta_2", "eps": "epsilon"},
            PartialRowWiseAdam: {"lr": "learning_rate", "betas.0": "beta1", "betas.1": "beta2", "eps": "epsilon"},
        },
    ),
}
# Settings that change an update in a way that no optimizer here has.
_OTHER_UPDATES = {
    "weight_decay": "adds the weights to the gradients",
    "maximize": "climbs the loss",
    "amsgrad": "divides by the largest second moments",
}
# A correction of moments by less than this changes no float32.
_LEAST_BIAS = 2.0**-25


def first_step(steps: Mapping[str, int | None]) -> tuple[int | None, list[str]]:
    """Return the step that a run continues at, None if it is not known, and notes about it.

    steps : the updates of tables whose rate depends on their number, by table; None: it is not known
    """
    step, notes = max((step for step in steps.values() if step is not None), default=None), []
    for name, own in steps.items():
        if own is None:
            notes.append(f"{name}: the rate of its updates depends on the step, which the source does not have")
        elif own != step:
            notes.append(f"{name}: its optimizer has made {own:,} steps, and another one {step:,}")
    return step, notes


def differences(spec: TableSpec, state: OptimizerState) -> Iterator[str]:
    """Yield a note for everything in which torch's optimizer differs from that of a table."""
    name, settings, optimizer = spec.name, state.settings, spec.optimizer
    kind = next((kind for setting, kind in _KINDS.items() if setting in settings), None)
    if kind is not None and type(optimizer) not in kind.numbers:
        continuing, numbers = next(iter(kind.numbers.items()))
        text = ", ".join(f"{ours}={settings[theirs]:g}" for theirs, ours in numbers.items() if theirs in settings)
        here, there = type(optimizer).__name__, continuing.__name__
        yield f"{name}: torch's {kind.title} is not {here}; {there}({text}) continues the run"
        return
    for theirs, ours in {} if kind is None else kind.numbers[type(optimizer)].items():
        value = getattr(optimizer, ours)
        if theirs in settings and isinstance(value, int | float) and float32(value) != float32(settings[theirs]):
            yield f"{name}: {ours} is {value:g} in the configuration, and was {settings[theirs]:g} in torch"
    if isinstance(optimizer, Adam) and kind is not None:
        yield from _differences_of_adam(name, optimizer, state)
    for setting, effect in _OTHER_UPDATES.items():
        if settings.get(setting) and not settings.get(f"decoupled_{setting}"):
            yield f"{name}: torch's {setting} {effect}, which no optimizer here does"


def _differences_of_adam(name: str, optimizer: Adam, state: OptimizerState) -> Iterator[str]:
    if optimizer.sum_inside_sqrt:
        yield f"{name}: torch's Adam adds epsilon to the root, as Adam does with sum_inside_sqrt=False"
    beta2, step = state.settings.get("betas.1", optimizer.beta_2), state.step or 0
    if isinstance(optimizer.learning_rate, int | float) and 0 < beta2 < 1 and beta2**step > _LEAST_BIAS:
        yield f"{name}: torch's Adam corrects its moments, as a rate of lr*sqrt(1-beta_2^t)/(1-beta_1^t) does"
