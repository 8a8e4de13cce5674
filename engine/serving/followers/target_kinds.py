"""What a ``TARGET`` declares, and which target a URI names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from penstock.base.errors import UsageError
from penstock.base.integrations import TARGETS, declared
from penstock.io.registry import UriKind, either
from penstock.serving.followers.target import Target

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class TargetKind(UriKind):
    """A kind of target. holds, transaction : what it stores, and what a transaction is, for the docs

    open : returns the target that a URI names; one that needs a state, given the file of it
    interval_s : default seconds between two transactions
    """

    holds: str
    transaction: str
    open: Callable[..., Target]
    interval_s: float = 0.2
    needs_state: bool = False
    docs_page = "targets.md"


@cache
def target_kinds() -> tuple[TargetKind, ...]:
    """Return all kinds, the freshest first, and the function last."""
    kinds: list[TargetKind] = declared(TARGETS, "TARGET")
    return tuple(sorted(kinds, key=lambda kind: (kind.needs_state, kind.interval_s, kind.title)))


def target_kind(text: str) -> TargetKind:
    """Return the kind that a text names. Raises UsageError."""
    is_function = _FUNCTION.fullmatch(text) is not None
    for kind in target_kinds():
        if text.startswith(kind.schemes) or (is_function and kind.needs_state):
            return kind
    raise UsageError(f"--into {text.rpartition('@')[2]}: expected {target_forms()}")


def target_forms() -> str:
    return either(kind.form for kind in target_kinds())


def open_target(text: str, state: str | os.PathLike[str] | None = None) -> Target:
    """Return the target that a text names. state : file for the number of a function's last delta

    Raises UsageError for another text, and if the target's library is not installed. Nothing is connected yet.
    """
    kind = target_kind(text)
    if not kind.needs_state:
        if state is not None:
            raise UsageError(
                f"--state: only a function needs it; {kind.title} stores the number of the last delta itself"
            )
        return kind.open(text)
    if state is None:
        raise UsageError(f"{text}: give --state FILE, which stores the number of the function's last delta")
    return kind.open(text, state)
