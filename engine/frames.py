"""The values that flow: Frame → Coalesced. Frozen, and valid once built; numpy only.

A frame that exists has been validated to its end: ids lie inside their tables, gradients are
finite and as long as their table is wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """Gradient rows of one table in arrival order.

    ids : int64, shape (n,)
    grads : float32, shape (n, dim), rows contiguous; may look into Arrow's memory
    """

    ids: Int64
    grads: Float32


@dataclass(frozen=True)
class Frame:
    """What one producer sent for one of its steps.

    rows : by table, the blocks of its contribution in arrival order; only tables that occur
    num_rows : gradient rows read for it, the dropped ones included
    local_step : the producer's step, or None: never stale
    contributor : who sent it, or None
    learning_rates : one value per dynamic tag, or None where the stream carries none
    dropped : rows left out, by reason
    source : where it came from, for messages
    bad_rows : the rows left out, as Arrow record batches, where they are to be put into a quarantine
    """

    rows: Mapping[str, tuple[Rows, ...]]
    num_rows: int
    local_step: int | None = None
    contributor: int | str | None = None
    learning_rates: tuple[float, ...] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    bad_rows: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Coalesced:
    """One table's gradients of one opening, each id once, in order of first appearance.

    ids : int64, shape (u,), distinct
    grads : float32, shape (u, dim), summed, and divided where the reduction is mean
    """

    ids: Int64
    grads: Float32
