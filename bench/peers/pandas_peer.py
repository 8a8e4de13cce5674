"""pandas: an Index, whose hash table looks keys up; new keys build another one. Or a factorization of all keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from penstock.bench.contestants import KeyWay
from penstock.bench.distributions import Int64


def ways(threads: int) -> list[KeyWay]:
    return [
        KeyWay("pandas_index", "pandas", lambda _: PandasKeys(), number_by_index),
        KeyWay("pandas_factorize", "pandas", lambda _: PandasKeys(), number_by_factorize),
    ]


@dataclass
class PandasKeys:
    """The keys so far."""

    index: Any = field(default_factory=lambda: pd.Index([], dtype=np.int64))
    keys: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))


def number_by_index(table: PandasKeys, keys: Int64) -> Any:
    numbers = table.index.get_indexer(keys)
    new = numbers < 0
    num_new = np.count_nonzero(new)
    if num_new:
        numbers[new] = np.arange(len(table.index), len(table.index) + num_new)
        table.index = table.index.append(pd.Index(keys[new]))
    return numbers


def number_by_factorize(table: PandasKeys, keys: Int64) -> Any:
    codes, uniques = pd.factorize(np.concatenate([table.keys, keys]))
    codes = codes[len(table.keys) :]
    table.keys = np.asarray(uniques)
    return codes
