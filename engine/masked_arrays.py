"""Masked NumPy arrays, which penstock rejects: a conversion to a plain array would use the masked values."""

from __future__ import annotations

import sys
from typing import Any

MASKED = "got a masked array (numpy.ma): fill it (filled()) or leave out what it masks"


def is_masked(given: Any) -> bool:
    """Return whether this is a masked array, or a list or tuple that contains one."""
    # Without an import, which takes tens of milliseconds: until a caller imports numpy.ma, there is no masked array.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and _holds(kind, given)


def _holds(kind: type, given: Any) -> bool:
    if isinstance(given, list | tuple):
        return any(_holds(kind, one) for one in given)
    return isinstance(given, kind)
