"""The gradient rows that a batch of examples represents, which are never materialized.

A gradient row is one lookup of one feature of one example: its sample's gradient times its gain. The rows of a table
are in the order of its examples, then of its features in the configuration, for any batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.io.decoding.columns import Bool, Float32, Int64
from penstock.io.decoding.frame_columns import Broken
from penstock.io.decoding.rows import Examples, RowBatch, SampleGradients


@dataclass(frozen=True)
class ExampleUses:
    """One feature's lookups of one batch, in order.

    table : of the feature; column : the number of its column among those in use
    lengths : int64, shape (examples,), lookups of each
    raw_ids : any integers, shape (n,), 0 where ids_null
    gradients : float32, shape (m, dim), of samples; samples : int64, shape (n,), ascending: the sample of each lookup
    gains : float32, shape (n,), None: all 1
    null : examples whose gradient is missing; None: no example with lookups
    truncated : int64, shape (examples,), ids dropped beyond a sequence's length; None if there is no length
    broken : the first example from which on nothing of the feature can be read
    """

    table: str
    column: int
    lengths: Int64
    raw_ids: npt.NDArray[Any]
    ids_null: Bool | None
    gradients: Float32
    samples: Int64
    gains: Float32 | None
    null: Bool | None
    truncated: Int64 | None
    broken: Broken | None


def table_rows(uses: Sequence[ExampleUses]) -> RowBatch:
    """Merge the lookups of the features of one table."""
    lengths = np.stack([use.lengths for use in uses])
    positions = _positions(lengths) if len(uses) > 1 else []
    gradients, samples, num_samples = [use.gradients for use in uses], [], 0
    for use in uses:
        samples.append(use.samples + num_samples if num_samples else use.samples)
        num_samples += len(use.gradients)
    raw_ids = _merged(positions, [use.raw_ids for use in uses])
    ids = [use.raw_ids.astype(np.int64, copy=False) for use in uses]
    return RowBatch(
        num_rows=len(raw_ids),
        tables=(uses[0].table,),
        codes=None,
        raw_ids=raw_ids,
        ids=raw_ids if raw_ids.dtype == np.int64 else _merged(positions, ids),
        ids_null=_optional(positions, [use.ids_null for use in uses], False),
        gradients=SampleGradients(
            gradients[0] if len(uses) == 1 else np.concatenate(gradients),
            _merged(positions, samples),
            _optional(positions, [use.gains for use in uses], np.float32(1)),
            _optional(
                positions, [None if use.null is None else np.repeat(use.null, use.lengths) for use in uses], False
            ),
        ),
        examples=Examples(lengths, np.array([use.column for use in uses])),
    )


def _positions(lengths: Int64) -> list[Int64]:
    """Return the positions of every feature's lookups in the order of examples, then features.

    lengths : int64, shape (features, examples)
    """
    starts = np.cumsum(lengths.T).reshape(lengths.T.shape).T - lengths
    return [
        np.repeat(first - (np.cumsum(own) - own), own) + np.arange(own.sum())
        for own, first in zip(lengths, starts, strict=True)
    ]


def _merged(positions: Sequence[Int64], arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Merge one array per feature into one, by the positions of their values."""
    if len(arrays) == 1:
        return arrays[0]
    kinds = {array.dtype for array in arrays}
    # No integer type has both signs and all of uint64.
    kind: Any = object if len(kinds) > 1 and np.dtype(np.uint64) in kinds else np.result_type(*kinds)
    out = np.empty(sum(map(len, positions)), kind)
    for indices, array in zip(positions, arrays, strict=True):
        out[indices] = array
    return out


def _optional(positions: Sequence[Int64], arrays: Sequence[npt.NDArray[Any] | None], default: Any) -> Any:
    """Merge one array per feature, the default for those without; None if no feature has one."""
    if len(arrays) == 1 or all(array is None for array in arrays):
        return arrays[0]
    return _merged(
        positions, [np.full(len(p), default) if a is None else a for p, a in zip(positions, arrays, strict=True)]
    )
