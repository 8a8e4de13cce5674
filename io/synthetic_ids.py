"""The ids of synthetic logs: entries of a vocabulary, drawn by popularity, as dense ids or as 64-bit keys that churn.

An entry is a number below the vocabulary's size. A dense id is its entry. Hashed, an entry stands for one key after
the other: before step s of n, floor(churn · vocabulary · s / n) keys have been replaced, in order of their entries,
from the first entry again after the last. The key of an entry that was replaced g times is a bijective 64-bit hash of
entry + g · vocabulary and of the table, so no key returns, and half of them are negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.io.exact_draws import ExactDraws, power
from penstock.model.frames import Int64

# The multiplier is a prime above every vocabulary. The product stays below 2^63: rank < 2^31, multiplier < 2^32.
_MULTIPLIER, _OFFSET = 2_654_435_761, 12_345
_CHUNK = 1 << 14  # entries of a zipf table that are computed together, in the CPU's cache


@dataclass(frozen=True)
class SynthTable:
    """One table of a log. share : of the rows; alpha : exponent of zipf, None where ids are uniform."""

    name: str
    vocabulary_size: int
    dim: int
    share: float
    alpha: float | None


class IdStream:
    """Draws the ids of tables.

    draws : of entries; keys : of what tells the keys of two tables and seeds apart; None: ids are dense
    churn : the share of the vocabulary that is replaced in num_steps steps
    """

    def __init__(
        self,
        tables: Sequence[SynthTable],
        draws: ExactDraws,
        keys: ExactDraws | None,
        churn: float,
        num_steps: int,
    ) -> None:
        self._tables, self._draws, self._churn, self._num_steps = tables, draws, churn, num_steps
        self._salts = None if keys is None else keys.integers(len(tables))
        zipfs = {(table.vocabulary_size, table.alpha) for table in tables if table.alpha is not None}
        self._cumulative = {zipf: _zipf_cumulative(*zipf) for zipf in zipfs}

    def draw(self, number: int, count: int, step: int) -> Int64:
        """Draw the ids of the rows of a step: int64 (count,). number : of the table"""
        table = self._tables[number]
        entries = self._entries(table, count)
        if self._salts is None:
            return entries
        size = table.vocabulary_size
        num_replaced = int(self._churn * size * step / self._num_steps)
        entries += (num_replaced - entries + size - 1) // size * size
        return mixed(entries.view(np.uint64) ^ self._salts[number]).view(np.int64)

    def _entries(self, table: SynthTable, count: int) -> Int64:
        if table.alpha is None:
            return self._draws.below(table.vocabulary_size, count)
        cumulative = self._cumulative[table.vocabulary_size, table.alpha]
        return spread(np.searchsorted(cumulative, self._draws.units(count), side="right"), table.vocabulary_size)


def spread(ranks: Int64, vocabulary_size: int) -> Int64:
    """Return the entry of each rank, by a bijection that scatters the frequent ones over a vocabulary of up to 2^31."""
    return (ranks * _MULTIPLIER + _OFFSET) % vocabulary_size


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's finalizer (Steele, Lea and Flood, 2014) of each number: a bijection of 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _zipf_cumulative(size: int, alpha: float) -> npt.NDArray[np.float64]:
    """Return P(rank <= r) for P(r) ∝ (r+1)^-alpha, for inverse sampling. Ends in exactly 1, and every draw is below."""
    table = np.arange(1, size + 1, dtype=np.float64)
    for first in range(0, size, _CHUNK):
        part = table[first : first + _CHUNK]
        part[:] = power(part, -alpha)
    np.cumsum(table, out=table)
    table /= table[-1]
    return table
