"""The variants that update tables, by name: backends.py says what each is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.base.integrations import KERNELS

# Those that a caller may ask for, in the order of docs/devices.md.
VARIANTS = ("auto", "xla", "pallas", "sparsecore", "host")


def kernel(variant: str) -> Any:
    """Return the module of a variant whose steps are a kernel for a TPU, which needs a canary."""
    return import_module(KERNELS[variant])
