"""Distributions of ids: each ``Draw`` draws ranks by popularity, which ``spread`` maps to ids.

They are vectorised and need no arrays as long as the vocabulary: 10^8 ids take no more memory than 10^4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.io.synthetic_ids import mixed, spread

Int64 = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int, int], Int64]  # (rng, rows, vocabulary_size) → ids

_HEAD = 1 << 16  # ranks whose probabilities are summed exactly; beyond them, the integral is exact to 1e-10


def hashed(ids: Int64) -> Int64:
    """Return a key of 64 bits for every id, as a hash gives it. The mapping is a bijection."""
    return mixed(ids.astype(np.uint64)).view(np.int64)


def zipf(exponent: float) -> Draw:
    """Return a bounded zipf, by its inverse distribution function: head summed, tail integrated. exponent : not 1"""
    flat = 1.0 - exponent

    def tail(ranks: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the integral of x^-exponent from the end of the head to each rank + 1/2."""
        return np.asarray((np.asarray(ranks, np.float64) + 0.5) ** flat - (_HEAD + 0.5) ** flat) / flat

    def draw(rng: np.random.Generator, rows: int, vocabulary_size: int) -> Int64:
        head = np.cumsum(np.arange(1, min(_HEAD, vocabulary_size) + 1, dtype=np.float64) ** -exponent)
        beyond = float(tail(vocabulary_size)) if vocabulary_size > _HEAD else 0.0
        quantiles = rng.random(rows) * (head[-1] + beyond)
        ranks = np.searchsorted(head, quantiles, side="right").astype(np.int64)
        far = ranks >= len(head)
        distance = (quantiles[far] - head[-1]) * flat + (_HEAD + 0.5) ** flat
        ranks[far] = np.minimum(distance ** (1.0 / flat) + 0.5, vocabulary_size).astype(np.int64) - 1
        return spread(np.minimum(ranks, vocabulary_size - 1), vocabulary_size)

    return draw


def uniform(rng: np.random.Generator, rows: int, vocabulary_size: int) -> Int64:
    """Draw every id with the same probability."""
    return rng.integers(0, vocabulary_size, rows)


def hot(num_ids: int) -> Draw:
    """Return a uniform draw from ``num_ids`` ids that are scattered over the vocabulary."""

    def draw(rng: np.random.Generator, rows: int, vocabulary_size: int) -> Int64:
        return spread(rng.integers(0, min(num_ids, vocabulary_size), rows), vocabulary_size)

    return draw


def reused(times: int) -> Draw:
    """Return a draw in which every id that occurs does so ``times`` times (the last perhaps less), in random order."""

    def draw(rng: np.random.Generator, rows: int, vocabulary_size: int) -> Int64:
        first = int(rng.integers(0, vocabulary_size))
        ranks = (np.arange(rows, dtype=np.int64) // times + first) % vocabulary_size
        return spread(rng.permutation(ranks), vocabulary_size)

    return draw


def lognormal_uses(mean_log: float, stddev_log: float) -> Draw:
    """Return a draw of random ids, each used ``ceil(exp(N(mean_log, stddev_log)))`` times, in random order.

    It models the reuse histograms of production recommenders: most ids occur once or twice, a few thousands of times.
    """

    def draw(rng: np.random.Generator, rows: int, vocabulary_size: int) -> Int64:
        uses = np.ceil(np.exp(rng.normal(mean_log, stddev_log, min(rows, vocabulary_size)))).astype(np.int64)
        ids = rng.permutation(vocabulary_size)[: len(uses)]
        # Repeat the draws if the table is too small for so many rows.
        rows_of_ids = np.resize(np.repeat(ids, uses)[: max(rows, 1)], rows)
        return rng.permutation(rows_of_ids)

    return draw
