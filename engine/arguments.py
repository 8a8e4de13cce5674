"""Arguments from Python, checked where they come in: a wrong one is a UsageError that names it."""

from __future__ import annotations

import operator
from typing import Any

from penstock.errors import UsageError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def whole(name: str, value: Any, least: int = INT64_MIN) -> int:
    """value as an int64 from ``least`` on; any integer type is one, a float or a string is not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}: expected a whole number, got {value!r}") from None
    if number < least:
        raise UsageError(f"{name}: expected at least {least}, got {number}")
    if number > INT64_MAX:
        raise UsageError(f"{name}: expected an int64, got {number}")
    return number
