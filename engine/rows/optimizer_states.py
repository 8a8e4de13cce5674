"""What an imported state of torch's optimizers asks of the configuration: the step to begin at, and equal numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.io.table_formats.table_format import OptimizerState
from penstock.model.config.specs import TableSpec
from penstock.model.updates import TorchAdagrad
from penstock.model.updates.rule import float32

# torch's names of the numbers of torch.optim.Adagrad, the only group of torch's with a decay of the rate, and ours.
_ADAGRAD = {"lr": "learning_rate", "lr_decay": "lr_decay", "eps": "epsilon"}
# Settings that change an update in a way that no optimizer here has.
_OTHER_UPDATES = {
    "weight_decay": "adds the weights to the gradients",
    "maximize": "climbs the loss",
    "amsgrad": "divides by the largest second moments",
}


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
    if "lr_decay" in settings:
        continued = adagrad_of(settings)
        if not isinstance(optimizer, TorchAdagrad):
            text = ", ".join(f"{ours}={settings[theirs]:g}" for theirs, ours in _ADAGRAD.items() if theirs in settings)
            yield f"{name}: torch's Adagrad is not {type(optimizer).__name__}; TorchAdagrad({text}) continues the run"
            return
        for theirs, ours in _ADAGRAD.items():
            here, there = getattr(optimizer, ours), getattr(continued, ours)
            if theirs in settings and isinstance(here, int | float) and float32(here) != float32(there):
                yield f"{name}: {ours} is {here:g} in the configuration, and was {there:g} in torch"
    for setting, effect in _OTHER_UPDATES.items():
        if settings.get(setting):
            yield f"{name}: torch's {setting} {effect}, which no optimizer here does"


def adagrad_of(settings: Mapping[str, float]) -> TorchAdagrad:
    """Return the optimizer of a group's settings. Raises ConfigError for a number out of its range."""
    numbers: dict[str, Any] = {ours: settings[theirs] for theirs, ours in _ADAGRAD.items() if theirs in settings}
    return TorchAdagrad(**numbers)
