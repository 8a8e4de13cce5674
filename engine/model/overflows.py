"""The rows at which a sum leaves the finite range: they are not added."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.model.frames import Frame, Rows, Summed
from penstock.pyx.row_sums import add_finite


def overflows_of(blocks: Sequence[Rows], held: Sequence[Summed] = ()) -> list[npt.NDArray[np.bool_]]:
    """Return the rows of a table at which a sum leaves the finite range, as a mask per block.

    Such a row is not added, and the rows after it are. held : what has been summed before
    """
    if not blocks:
        return []
    ids, slots = np.unique(np.concatenate([block.ids for block in blocks]), return_inverse=True)
    sums = np.full((len(ids), blocks[0].grads.shape[1]), -0.0, blocks[0].grads.dtype)
    for part in held:
        _, of_ids, of_part = np.intersect1d(ids, part.ids, assume_unique=True, return_indices=True)
        sums[of_ids] = part.sums[of_part]
    finite = np.asarray(np.isfinite(sums).all(axis=1))  # those of an accumulator may be infinite before
    ends = np.cumsum([len(block.ids) for block in blocks])
    masks = []
    for block, of_block in zip(blocks, np.split(slots, ends[:-1]), strict=True):
        rows = block.grads if block.which is None else block.grads[block.which]
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.ascontiguousarray(rows if block.gains is None else rows * block.gains[:, None])
        refused = np.zeros(len(rows), np.uint8)
        add_finite(sums, of_block, rows, refused)
        masks.append(np.logical_and(refused, finite[of_block]))
    return masks


def without_overflows(frame: Frame) -> Frame:
    """Return an audited frame without the rows at which its sums alone leave the finite range. Raises InputError."""
    if not any(_may_overflow(blocks) for blocks in frame.rows.values()):
        return frame
    overflows = {table: overflows_of(blocks) for table, blocks in frame.rows.items()}
    bad = any(mask.any() for masks in overflows.values() for mask in masks)
    return frame.without(overflows) if bad else frame


def _may_overflow(blocks: Sequence[Rows]) -> bool:
    """Return whether the values of a frame's rows are so large that a sum may leave the finite range."""
    largest, num_rows = 0.0, 0
    for block in blocks:
        if block.grads.size and len(block.ids):
            gain = 1.0 if block.gains is None else float(np.abs(block.gains).max())
            largest = max(largest, gain * max(float(block.grads.max()), -float(block.grads.min())))
            num_rows += len(block.ids)
    return num_rows > 1 and 2 * num_rows * largest > float(np.finfo(np.float32).max) / 2
