"""An error on its way from one process to the others, as plain data: all end with the same one line and exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import (
    ConfigError,
    InputError,
    PeerError,
    StaleInputError,
    StateError,
    TruncatedInputError,
    UsageError,
)

_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, UsageError, StateError, PeerError, MemoryError)
}
_OF_INPUT: dict[str, type[InputError]] = {
    kind.__name__: kind for kind in (InputError, StaleInputError, TruncatedInputError)
}


def described(error: BaseException) -> dict[str, Any]:
    """What ``raised`` makes an error of again."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _PLAIN or k.__name__ in _OF_INPUT), None)
    if isinstance(error, InputError):
        where = {name: getattr(error, name) for name in ("source", "batch", "row", "column", "reason")}
        return {"kind": kind, "text": error.problem, "where": where}
    if kind is None and isinstance(error, KeyboardInterrupt):
        kind = "KeyboardInterrupt"
    if kind is None and isinstance(error, OSError):
        return {"kind": "OSError", "text": error.strerror or str(error), "of": [error.errno, error.filename]}
    return {"kind": kind, "text": str(error) if kind else f"{type(error).__name__}: {error}"}


def raised(told: Mapping[str, Any], rank: int | None = None) -> BaseException:
    """The error again. rank : of the process that has it, where the message is to say so"""
    kind, text = told["kind"], told["text"] if rank is None else f"process {rank}: {told['text']}"
    if kind in _OF_INPUT:
        return _OF_INPUT[kind](told["text"], **told["where"])
    if kind in _PLAIN:
        return _PLAIN[kind](text)
    if kind == "KeyboardInterrupt":
        return KeyboardInterrupt(text)
    if kind == "OSError":
        number, filename = told["of"]
        return OSError(number, text, filename) if number is not None else PeerError(text)
    return PeerError(f"process {rank} failed: {told['text']}" if rank is not None else text)
