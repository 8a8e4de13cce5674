"""What steps on devices are run and compiled with: every optimizer, and lookups of a batch."""

from __future__ import annotations

from typing import Any

# Of a batch on one device.
LOOKUPS, LOOKUPS_PER_SAMPLE = 8192, 4
# Of the Zipf distribution of ids: of 8,192 lookups 3,962 touch a new row, and 911 the same.
EXPONENT = 1.12
# Settings of optimizers, where a learning rate of 0.1 alone will not do.
SETTINGS = {"AdagradMomentum": {"learning_rate": 0.1, "momentum": 0.9}, "Assign": {}}


def optimizers() -> dict[str, Any]:
    """Return every optimizer that has a formula, by name."""
    from penstock.model.updates import OPTIMIZERS, UPDATES, UserDefinedProgram

    classes = [OPTIMIZERS[algorithm] for algorithm in UPDATES if algorithm != UserDefinedProgram.parameters_field]
    return {
        optimizer.__name__: optimizer(**SETTINGS.get(optimizer.__name__, {"learning_rate": 0.1}))
        for optimizer in classes
    }


def batch_of(layout: Any, by_gathers: bool, lookups: int = LOOKUPS) -> Any:
    """Return the lookups of a batch: ids by a Zipf distribution, a few per sample, some of them often."""
    import numpy as np

    from penstock.api.activations.deduplication import FeatureUses
    from penstock.rows.bridge.functional_table import Feature
    from penstock.rows.bridge.lookup_plan import LookupPlan

    n, rng = layout.num_devices, np.random.default_rng(0)
    size, num_samples = lookups * n, lookups * n // LOOKUPS_PER_SAMPLE
    ids, rows = np.unique(rng.zipf(EXPONENT, size) % layout.vocabulary_size, return_inverse=True)
    samples = np.sort(rng.integers(0, num_samples, size)).astype(np.uint32)
    feature = Feature("f", (num_samples,))
    plan = LookupPlan.of(layout, ids, [feature], [FeatureUses(rows.astype(np.uint32), samples, None, 0)], by_gathers)
    return plan.padded(plan.sizes)
