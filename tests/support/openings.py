"""Openings of a directory, and what tests ask of them."""

import numpy as np
from accumulate import int64

from penstock.pyx.keys.directory_plan import Plan


def hashed(numbers):
    """Keys of all 64 bits, one per number."""
    return (np.asarray(numbers).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def opened(directory, keys, step, clock=None, rows=None, frames=None, **options):
    """Commit one opening; return the plan."""
    counts = [None if group is None else int64(group) for group in (rows, frames)]
    plan = Plan(directory, int64(keys), *counts, clock=step if clock is None else clock, step=step, **options)
    plan.commit()
    return plan


def present(directory, keys):
    """Whether each key has a row."""
    return (directory.rows(int64(keys)) >= 0).tolist()


def removals(plan):
    """The keys that a plan removes, and why."""
    keys, why = plan.removed()
    return list(zip(keys.tolist(), why.tolist(), strict=True))


def state_of(directory):
    """Return everything that decides the future."""
    decides = {name: array for name, array in directory.get_state().items() if not name.startswith(("row", "removed."))}
    return {name: array.tolist() for name, array in decides.items()}
