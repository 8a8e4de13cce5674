"""Arguments from Python, checked where they come in: a wrong one is a UsageError that names it."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from penstock.errors import UsageError, UsageTypeError

P = ParamSpec("P")
R = TypeVar("R")
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def check_known(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError for the first name that is no argument of a call."""
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
            raise UsageTypeError(f"{call}: unknown argument '{name}'; {hint}")


def known_options(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a misspelt option of a method a UsageError that names the nearest one. The signature stays visible."""

    def checked(method: Callable[P, R]) -> Callable[P, R]:
        options = [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
        named = set(inspect.signature(method).parameters)

        @wraps(method)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if not named.issuperset(kwargs):
                check_known(call, [name for name in kwargs if name not in named], options)
            return method(*args, **kwargs)

        return called

    return checked


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


def share(name: str, value: Any) -> float:
    """value as a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise UsageError(f"{name}: expected a share from 0 to 1, got {value!r}")
    return float(value)


def place(name: str, value: Any) -> Path:
    """value as a path: a string is one, or what has ``__fspath__``."""
    try:
        return Path(value)
    except TypeError:
        raise UsageTypeError(f"{name}: expected a path, got {value!r}") from None


def function(name: str, value: Any) -> Any:
    """value, which can be called."""
    if not callable(value):
        raise UsageTypeError(f"{name}: expected something to call, got {value!r}")
    return value
