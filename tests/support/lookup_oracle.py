"""Lookups in plain NumPy, one id at a time: of example streams and of activations. Nothing of penstock is used."""

from typing import NamedTuple

import numpy as np

ZERO, ONE = np.float32(0), np.float32(1)

# ---- features of examples


class Feature(NamedTuple):
    """Combined where ``length`` is 0, else a sequence of at most that many ids."""

    name: str
    table: str
    combiner: str
    length: int = 0


class Looked(NamedTuple):
    """What a feature of one example looks up. ``ids``: None for none; in a sequence None is a null id."""

    ids: list | None
    weights: list | None = None
    gradient: list | None = None  # of the feature's activation; a sequence has dim values per position


class Lookup(NamedTuple):
    """The gradient row that one id of one example stands for; ``reason`` where it is bad."""

    row: int  # the example, counted over the stream
    feature: str
    table: str
    id: int | None
    gradient: np.ndarray | None
    reason: str | None


@np.errstate(all="ignore")
def gains(weights, combiner):
    """The factor of each lookup of one sample: its weight times the scale 1, 1/sum(w) or 1/sqrt(sum(w*w))."""
    weights = np.asarray(weights, np.float32)
    if combiner == "sum":
        return weights
    total = ZERO
    for weight in weights:
        total = total + (weight if combiner == "mean" else weight * weight)
    if total == 0:
        return weights * ZERO
    divisor = total if combiner == "mean" else np.sqrt(total)
    scale = ONE / divisor
    return weights * scale if np.isfinite(scale) else weights / divisor


def lookups(row, feature, vocabulary_size, dim, looked):
    """The gradient rows of one feature of one example, and how many ids a sequence's length cuts off."""
    ids = looked.ids or []
    gradient = None if looked.gradient is None else np.asarray(looked.gradient).astype(np.float32)
    truncated = 0
    if feature.length:
        truncated = max(0, len(ids) - feature.length)
        ids = ids[: feature.length]
        factors = np.ones(len(ids), np.float32)
    else:
        factors = gains([ONE] * len(ids) if looked.weights is None else looked.weights, feature.combiner)
    results = []
    for position, (i, factor) in enumerate(zip(ids, factors, strict=True)):
        first = position * dim if feature.length else 0
        g = None if gradient is None else gradient[first : first + dim] * factor
        reason = None
        if i is None:
            reason = "id_null"
        elif not 0 <= i < vocabulary_size:
            reason = "id_out_of_range"
        elif g is None:
            reason = "gradient_null"
        elif not np.isfinite(g).all():
            reason = "gradient_not_finite"
        results.append(Lookup(row, feature.name, feature.table, i, g, reason))
    return results, truncated


# ---- activations and their gradients


class Use(NamedTuple):
    """A looked-up row: which sample's, at which position of a sequence, and its factor."""

    sample: int
    position: int
    id: int
    gain: np.float32


def uses(feature, ids, weights=None):
    """The lookups of a batch of one feature in order, and how many ids a sequence's length cuts off.

    ids : a list per sample; in a sequence None is a position without an id
    """
    results, truncated = [], 0
    for sample, row in enumerate(ids):
        if feature.length:
            results += [Use(sample, index, i, ONE) for index, i in enumerate(row[: feature.length]) if i is not None]
            truncated += sum(i is not None for i in row[feature.length :])
        else:
            factors = gains([ONE] * len(row) if weights is None else weights[sample], feature.combiner)
            results += [Use(sample, 0, i, factor) for i, factor in zip(row, factors, strict=True)]
    return results, truncated


@np.errstate(all="ignore")
def activations(feature, weights, num_samples, looked):
    """float64, (samples, dim) or (samples, length, dim); and the sum of what was added, without signs."""
    shape = (num_samples, max(feature.length, 1), weights.shape[1])
    total, size = np.zeros(shape), np.zeros(shape)
    for sample, position, i, gain in looked:
        term = weights[i].astype(np.float64) * gain
        total[sample, position] += term
        size[sample, position] += np.abs(term)
    return (total, size) if feature.length else (total[:, 0], size[:, 0])


@np.errstate(all="ignore")
def gradient_rows(features, looked, gradients):
    """One frame, table → [(id, gradient)]: feature by feature, lookup by lookup. None stands for zeros."""
    rows = {}
    for feature in features:
        g = gradients[feature.name]
        for sample, position, i, gain in looked[feature.name]:
            offset = (sample, position) if feature.length else sample
            row = (np.zeros(1, np.float32) if g is None else g[offset]) * gain
            rows.setdefault(feature.table, []).append((i, row))
    return rows
