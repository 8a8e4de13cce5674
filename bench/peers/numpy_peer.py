"""NumPy: a stable sort of the ids, ``add.reduceat`` over the sorted rows, fancy indexing into the tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from penstock.bench.contestants import BETA1, BETA2, EPSILON, RATE, UPDATES, Way, initial_parts
from penstock.bench.workloads import TableSize


def ways(threads: int) -> list[Way]:
    """Return the ways. NumPy always uses one thread."""
    result = [
        Way("numpy_argsort_reduceat", "numpy", "coalesce", coalesced),
        Way("numpy_unique_add_at", "numpy", "coalesce", add_at, slow=True),
    ]
    for kind in UPDATES:
        result.append(
            Way(
                "numpy_reduceat_fancy",
                "numpy",
                kind,
                partial(step, kind),
                state=partial(start, kind),
                read_rows=lambda state, ids: state[0][ids],
            )
        )
    return result


def coalesced(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    return coalesce(ids, grads)


def coalesce(ids: Any, grads: Any) -> tuple[Any, Any]:
    """Return the distinct ids in ascending order, and their sums."""
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    first = np.empty(len(ranked), bool)
    first[:1] = True
    np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return ranked[starts], np.add.reduceat(grads[order], starts, axis=0)


def add_at(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(unique), grads.shape[1]), np.float32)
    np.add.at(sums, inverse, grads)
    return unique, sums


def start(kind: str, table: TableSize) -> list[Any]:
    """Return weights and slots."""
    return [np.full(shape, value, np.float32) for shape, value in initial_parts(kind, table)]


def step(kind: str, state: list[Any], ids: Any, grads: Any) -> None:
    update(kind, state, *coalesce(ids, grads))


def update(kind: str, state: list[Any], ids: Any, g: Any) -> None:
    """Update the rows of distinct ids in place."""
    rate = np.float32(RATE)
    if kind == "sgd":
        state[0][ids] -= rate * g
    elif kind in ("adagrad", "rowwise_adagrad"):
        square = g * g
        accumulated = state[1][ids] + (square if kind == "adagrad" else square.mean(axis=1, keepdims=True))
        state[1][ids] = accumulated
        state[0][ids] -= rate * g / np.sqrt(accumulated)
    elif kind == "adam":
        m = np.float32(BETA1) * state[1][ids] + np.float32(1 - BETA1) * g
        v = np.float32(BETA2) * state[2][ids] + np.float32(1 - BETA2) * g * g
        state[1][ids], state[2][ids] = m, v
        state[0][ids] -= rate * m / (np.sqrt(v) + np.float32(EPSILON))
    else:
        before = state[1][ids]
        after = before + g * g
        root = np.sqrt(after)
        linear = state[2][ids] + g - (root - np.sqrt(before)) / rate * state[0][ids]
        state[1][ids], state[2][ids] = after, linear
        state[0][ids] = -linear * rate / root
