"""Validation of arguments at the public interface: an invalid one raises a UsageError that names it.

Masked NumPy arrays are rejected: a conversion to a plain array would use the masked values.
"""

from __future__ import annotations

import ipaddress
import operator
import sys
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from penstock.base.errors import UsageError, UsageTypeError, close_names

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
NO_URI = "expected a path of this machine, got a URI; copy to or from a store with its own tools"
MASKED = "got a masked array (numpy.ma): fill it (filled()) or leave out what it masks"


def check_known(call: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageTypeError for the first name that is not an argument of a call. known : the argument names"""
    names = sorted(known)
    for name in arguments:
        if name not in names:
            near = close_names(name, names, cutoff=0.65)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
            raise UsageTypeError(f"{call}: unknown argument '{name}'; {hint}")


def whole(name: str, value: Any, least: int = INT64_MIN) -> int:
    """Return value, of any integer type but bool, as an int64. Raises UsageError, also below ``least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}: expected a whole number, got {value!r}") from None
    if number < least:
        raise UsageError(f"{name}: expected at least {least}, got {number}")
    if number > INT64_MAX:
        raise UsageError(f"{name}: expected an int64, got {number}")
    return number


def fraction(name: str, value: Any) -> float:
    """Return value as a float from 0 to 1. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise UsageError(f"{name}: expected a share from 0 to 1, got {value!r}")
    return float(value)


def place(name: str, value: Any) -> Path:
    """Return value, a string or an object with ``__fspath__``, as a Path. Raises UsageError, also for a URI."""
    try:
        path = Path(value)
    except TypeError:
        raise UsageTypeError(f"{name}: expected a path, got {value!r}") from None
    if is_uri(value):
        raise UsageError(f"{name}: {NO_URI}")
    return path


def is_uri(value: Any) -> bool:
    """Return whether value is the text of a URI."""
    return isinstance(value, str) and "://" in value


def function(name: str, value: Any) -> Any:
    """Return value, a callable. Raises UsageTypeError."""
    if not callable(value):
        raise UsageTypeError(f"{name}: expected something to call, got {value!r}")
    return value


def is_masked(value: Any) -> bool:
    """Return whether this is a masked array, or a list or tuple that contains one."""
    # Without an import, which takes tens of milliseconds: until a caller imports numpy.ma, there is no masked array.
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and _contains(kind, value)


def _contains(kind: type, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_contains(kind, item) for item in value)
    return isinstance(value, kind)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that listens on this host, a name or an IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
