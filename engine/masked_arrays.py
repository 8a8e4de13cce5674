"""Masked NumPy arrays, which nothing here takes: what makes a plain array of one would use what its mask hides."""

from __future__ import annotations

import sys
from typing import Any

MASKED = "got a masked array (numpy.ma): fill it (filled()) or leave out what it masks"


def is_masked(given: Any) -> bool:
    """Whether this is one, or a list or tuple with one inside."""
    # Not imported for this, which takes tens of milliseconds: before somebody has, there is no masked array.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and _holds(kind, given)


def _holds(kind: type, given: Any) -> bool:
    if isinstance(given, list | tuple):
        return any(_holds(kind, one) for one in given)
    return isinstance(given, kind)
