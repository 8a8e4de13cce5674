"""The format of a line: one physical row of a device's arrays, its planes, and the rows that share it.

A line has ``width`` elements per plane: plane 0 holds weights, the others slots. On a CPU or GPU it holds one row. On a
TPU its width is a multiple of 128, and short rows share it (``packed``). bfloat16 weights are stored two per word, so
twice as many rows share a line (``halves``), each with separate slots.

Slots of one number per row (the last ``row_slots``) follow the planes of a line on a CPU or GPU, so that one gather and
one scatter move both. On a TPU they lie outside the lines: each is an array of one axis, a float per row in the order
of the rows, which no tile pads. Among planes, such a slot is (n, group), after the planes of the line.

Gradients arrive in a line as float32 bits, or UNTOUCHED where there is none: a NaN that no arithmetic produces. So a
gradient of 0 is a gradient, the other rows of a line stay unchanged, and no mask is copied to the device.

A TPU lays out the last two axes of an array in tiles of (8, 128), or (4 | 2 | 1, 128) for an axis of that size. So a
plane wider than 128 is several strips of that width, and the strips of a line are distributed over arrays of 8, 4, 2
and 1: the three planes of Adam are two arrays, and no byte is padding.

XLA's scatter treats an array of one strip as a matrix, whose tiles hold 8 lines, and fetches and writes a whole tile
for each line. For XLA such an array is stored as the halves of its words, ``int16[lines, 2, 128]`` (``halved``): the
same bytes, in tiles of one line each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.model.frames import Float32, Int32, Int64
from penstock.rows.bridge.stochastic_rounding import RowIds

# A quiet NaN with a payload. Arithmetic produces 0x7FC00000 or an operand's payload, and operands are finite.
UNTOUCHED = 0x7FE5A5A5
# Rules that read, or may read, a whole row: they must not mix elements of different rows of a line.
BY_ROW = {"row_wise_adagrad", "partial_row_wise_adam", "user_defined_program"}
# Those that a kernel for a TPU does not run, by variant.
WITHOUT_KERNEL = {"pallas": BY_ROW, "sparsecore": BY_ROW - {"row_wise_adagrad"}}


@dataclass(frozen=True)
class Line:
    """The format of a table's lines; hashable, as a key of the program cache.

    row_ids : of a table with bfloat16 weights; else None
    halved : store an array of one strip as the halves of its words
    row_slots : how many slots, the last ones, have one number per row; the others are planes
    """

    dim: int
    num_slots: int
    lanes: int = 1
    row_ids: RowIds | None = None
    halved: bool = False
    row_slots: int = 0

    @property
    def width(self) -> int:
        return -(-self.dim // self.lanes) * self.lanes

    @property
    def packed(self) -> int:
        """Number of rows side by side in a plane."""
        return max(1, self.lanes // self.dim)

    @property
    def halves(self) -> int:
        """Number of weights in a word."""
        return 1 if self.row_ids is None else 2

    @property
    def group(self) -> int:
        """Number of rows in a line."""
        return self.packed * self.halves

    @property
    def masked(self) -> bool:
        """Whether a line may contain elements that a gradient of one of its rows does not touch."""
        return self.lanes > 1 or self.group > 1

    @property
    def strip(self) -> int:
        """Size of the arrays' last axis: the width of a plane, or on a TPU that of a register."""
        return self.width if self.lanes == 1 else self.lanes

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of strips of a line in each of the arrays of lines."""
        strips = self.num_planes * (self.width // self.strip)
        if self.lanes == 1:
            return (strips,)
        eights, rest = strips & ~7, strips & 7
        return tuple(part for part in (eights, *(rest & bit for bit in (4, 2, 1))) if part)

    @property
    def plane_slots(self) -> int:
        """Number of slots of the shape of the weights: planes, one for each half of the rows."""
        return self.num_slots - self.row_slots

    @property
    def num_planes(self) -> int:
        """Number of planes of a line."""
        return 1 + self.plane_slots * self.halves

    @property
    def dtype(self) -> Any:
        return np.float32 if self.halves == 1 else np.int32

    @property
    def slots_follow(self) -> bool:
        """Whether slots of one number per row follow the planes of their line."""
        return self.row_slots > 0 and self.lanes == 1

    @property
    def forms(self) -> tuple[tuple[tuple[int, int], Any], ...]:
        """(shape, dtype) of a line in each of the arrays of lines."""
        if self.slots_follow:
            return (((1, self.num_planes * self.width + self.row_slots * self.group), self.dtype),)
        cut = self.halved and self.lanes > 1
        return tuple(
            ((2, self.strip), np.int16) if cut and strips == 1 else ((strips, self.strip), self.dtype)
            for strips in self.groups
        )

    def arrays(self, num_lines: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """(shape, dtype) of the arrays of that many lines: those of lines, then the slots of one number per row."""
        of_rows = ((num_lines * self.group,), np.float32)
        slots = () if self.slots_follow else (of_rows,) * self.row_slots
        return (*(((num_lines, *shape), dtype) for shape, dtype in self.forms), *slots)

    def nbytes(self, num_lines: int) -> int:
        """Return the bytes of the arrays of that many lines."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.arrays(num_lines))

    def offsets(self, rows: Int32) -> Int64:
        """Return the offset of each of a device's rows in the ``halves * width`` words of its line."""
        inside = rows.astype(np.int64) % self.group
        return inside // self.packed * self.width + inside % self.packed * self.dim


def without_marks(values: Float32) -> Float32:
    """Return values with another NaN in place of the one that marks elements without a gradient."""
    reserved = values.view(np.int32) == UNTOUCHED
    return np.where(reserved, np.float32(np.nan), values) if reserved.any() else values
