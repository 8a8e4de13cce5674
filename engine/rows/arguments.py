"""The values of every part with which the rows of a table are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base.array_conversion import as_numbers, is_numeric
from penstock.base.errors import UsageError
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Float32


def checked_parts(
    table: str, parts: Sequence[str], by_name: Mapping[str, Any], num_rows: int, part_dims: Sequence[int]
) -> dict[int, Float32]:
    """Return part → copies of the values, float32 (num_rows, floats of the part), contiguous.

    parts : the names of all parts; by_name : the values. Raises UsageError for missing or other slots and wrong shapes.
    """
    if by_name.keys() != set(parts):
        wanted, got = (", ".join(name for name in names if name != WEIGHTS) or "none" for names in (parts, by_name))
        raise UsageError(f"table '{table}': expected the slots {wanted}; got {got}")
    values = {}
    for part, (name, dim) in enumerate(zip(parts, part_dims, strict=True)):
        values[part] = checked_rows(f"table '{table}', {name}", by_name[name], num_rows, dim)
    return values


def checked_rows(subject: str, rows: Any, num_rows: int, dim: int) -> Float32:
    """Return a contiguous copy of rows, float32 (num_rows, dim). Raises UsageError. subject : of messages"""
    array = as_numbers(rows, subject, UsageError)
    if not is_numeric(array):
        raise UsageError(f"{subject}: expected floats of shape {(num_rows, dim)}, got {array.dtype}")
    if array.shape != (num_rows, dim):
        raise UsageError(f"{subject}: expected shape {(num_rows, dim)}, got {array.shape}")
    try:
        with np.errstate(over="raise"):
            return np.array(array, np.float32, order="C")
    except FloatingPointError:
        raise UsageError(f"{subject}: expected values that are finite as float32, got larger ones") from None
