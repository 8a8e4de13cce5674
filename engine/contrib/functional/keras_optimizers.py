"""What a Keras optimizer finds of a layer's tables: arrays that check what it would do with them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import keras

from penstock.base.errors import UsageError

# The methods of an optimizer that allocate or assign variables.
OPTIMIZER_METHODS = ("build", "apply", "stateless_apply")


@dataclass(eq=False)
class BackwardPasses:
    """The backward passes of a layer in the step that is traced."""

    layer: str
    count: int = 0
    has_scale: bool = True

    def check(self, optimizer: Any) -> None:
        """Raise UsageError if what the optimizer would store is not the updated tables."""
        problems = {
            "it accumulates gradients, and every batch updates the tables; leave out gradient_accumulation_steps": (
                optimizer.gradient_accumulation_steps
            ),
            "it averages variables, and rows have no average; leave out use_ema": optimizer.use_ema,
            "it ends fit by the variables that the model lists, which are rows; use one optimizer": (
                isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))
            ),
            "the layer was called twice in one step, and two updates do not add up; make both lookups features of one "
            "configuration": self.count > 1,
            "it scales the loss, which lacks the layer's own loss, whose gradient is the scale; add sum(model.losses), "
            "or the losses of stateless_call(…, return_losses=True), before scaling": (
                _scales(optimizer) and not self.has_scale
            ),
        }
        for problem, applies in problems.items():
            if applies:
                raise UsageError(f"layer '{self.layer}', optimizer '{optimizer.name}': {problem}")


class TableArray(keras.Variable):  # type: ignore[misc]
    """An array of a table, which an optimizer overwrites by what the backward pass computed.

    An optimizer reads its path when it allocates accumulators, and ``overwrite_with_gradient`` before it overwrites it.
    Keras passes no optimizer, so that it is found among the callers: of a trace, not of a compiled step.
    """

    def __init__(self, passes: BackwardPasses, value: jax.Array, name: str) -> None:
        self._passes = passes
        super().__init__(lambda shape, dtype=None: value, value.shape, "float32", autocast=False, name=name)

    @property
    def path(self) -> Any:
        self._check_callers()
        return super().path

    @property
    def overwrite_with_gradient(self) -> bool:
        self._check_callers()
        return True

    def _check_callers(self) -> None:
        frame = inspect.currentframe()
        while frame is not None:
            # Only of these frames: f_locals keeps variables alive, which jax_check_tracer_leaks would find in its own.
            caller = frame.f_locals.get("self") if frame.f_code.co_name in OPTIMIZER_METHODS else None
            if isinstance(caller, keras.optimizers.Optimizer):
                self._passes.check(caller)
            frame = frame.f_back


def _scales(optimizer: Any) -> bool:
    return optimizer.loss_scale_factor is not None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
