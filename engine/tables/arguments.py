"""The values of every part with which the rows of a table are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.config.specs import WEIGHTS
from penstock.errors import UsageError
from penstock.frames import Float32
from penstock.validation import MASKED, is_masked


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
        if is_masked(by_name[name]):
            raise UsageError(f"table '{table}', {name}: {MASKED}")
        try:
            value = np.array(by_name[name], np.float32, order="C")
        except (TypeError, ValueError) as error:
            raise UsageError(f"table '{table}', {name}: expected floats of shape {(num_rows, dim)}: {error}") from None
        if value.shape != (num_rows, dim):
            raise UsageError(f"table '{table}', {name}: expected shape {(num_rows, dim)}, got {value.shape}")
        values[part] = value
    return values
