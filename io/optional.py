"""Libraries that only some sources and targets need, imported when one is opened."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.errors import UsageError


def library(module: str, extra: str, needed_by: str) -> Any:
    """Import an optional library. Raises UsageError if it is not installed. extra : of this package"""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise UsageError(f"{needed_by}: needs the package {module}: pip install 'penstock[{extra}]'") from None
