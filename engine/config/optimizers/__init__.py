"""All optimizer classes, and the conversion of an optimizer to its update rule.

Each family of classes has a module; import a new class here. Elsewhere, penstock.config names an optimizer only for a
rule of lint/ about it or a special case.
"""

from __future__ import annotations

import math

from penstock.config.optimizers.adagrad_family import (
    Adagrad,
    AdagradMomentum,
    BoundedAdagrad,
    FrequencyAwareAdagrad,
    MDLAdagradLight,
    ProximalAdagrad,
    RowWiseAdagrad,
)
from penstock.config.optimizers.float32 import float32
from penstock.config.optimizers.ftrl import FTRL, OnlineYogi, ProximalYogi
from penstock.config.optimizers.momentum import Adadelta, Adam, CenteredRMSProp, Lion, Momentum, RMSProp
from penstock.config.optimizers.optimizer_class import OPTIMIZERS, DynamicLearningRate, LearningRate, Optimizer
from penstock.config.optimizers.stateless import SGD, Assign, FrequencyEstimator, UserDefinedProgram
from penstock.updates import UpdateRule

__all__ = [
    "FTRL",
    "OPTIMIZERS",
    "OWN_OPTIMIZERS",
    "SGD",
    "WITHOUT_FORMULA",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Assign",
    "BoundedAdagrad",
    "CenteredRMSProp",
    "DynamicLearningRate",
    "FrequencyAwareAdagrad",
    "FrequencyEstimator",
    "LearningRate",
    "Lion",
    "MDLAdagradLight",
    "Momentum",
    "OnlineYogi",
    "Optimizer",
    "ProximalAdagrad",
    "ProximalYogi",
    "RMSProp",
    "RowWiseAdagrad",
    "UserDefinedProgram",
    "update_rule",
]

OWN_OPTIMIZERS = frozenset({RowWiseAdagrad.parameters_field})
"""Those that TensorFlow's message has no member for."""

WITHOUT_FORMULA = frozenset({MDLAdagradLight.parameters_field, FrequencyAwareAdagrad.parameters_field})
"""Those that can be loaded, kept and saved but not run: how they update is not public."""


def update_rule(optimizer: Optimizer) -> UpdateRule:
    """Return the constant part of the optimizer's update, with numbers in float32; equal rules share compiled code."""
    decay = float32(optimizer.weight_decay_factor or 0.0)
    switches = optimizer.fields()
    hyper = {
        name: bool(value) if switches[name] else float32(value)
        for name, value in optimizer.proto_values().items()
        if name not in optimizer.not_in_equation
    }
    return UpdateRule(
        algorithm=optimizer.parameters_field,
        num_slots=len(optimizer.slots()),
        hyper=tuple(sorted(hyper.items())),
        gradient_min=_bound(optimizer.clip_gradient_min, -math.inf),
        gradient_max=_bound(optimizer.clip_gradient_max, math.inf),
        weight_decay=decay,
        decay_times_learning_rate=bool(decay and optimizer.multiply_weight_decay_factor_by_learning_rate),
        weight_min=_bound(optimizer.clip_weight_min, -math.inf),
        weight_max=_bound(optimizer.clip_weight_max, math.inf),
        non_lazy=optimizer.non_lazy,
        program=optimizer.program if isinstance(optimizer, UserDefinedProgram) else None,
    )


def _bound(value: float | None, open_side: float) -> float | None:
    """Return a clip bound in float32, None if it clips nothing: such a bound costs nothing and equals an absent one."""
    if value is None or float32(value) == open_side:
        return None
    return float32(value)
