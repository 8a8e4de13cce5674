"""Who updates a table's rows, and in what form the table lies: by platform, unless the environment says otherwise.

| variant | where | made by |
|---|---|---|
| ffi | CPU, rows that lie by themselves | our handlers, pyx/update.pyx (direct.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | our kernel for the TensorCore (tensorcore.py) |
"""

from __future__ import annotations

import os

from jax.sharding import Mesh

from penstock.bridge import direct
from penstock.bridge.layout import Layout
from penstock.bridge.programs import BY_ROW
from penstock.errors import ConfigError
from penstock.updates import UpdateRule

VARIANTS = ("ffi", "xla", "pallas")
FORMS = {"plain": 1, "tiled": 128}
# For whom it concerns: tests, benches, and who doubts a variant.
VARIANT, FORM = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT"


def lanes(mesh: Mesh) -> int:
    """What the width of a table's lines is a multiple of, on these devices."""
    asked = _asked(FORM, tuple(FORMS))
    if asked is not None:
        return FORMS[asked]
    on_tpu = platform(mesh) == "tpu" or _asked(VARIANT, VARIANTS) == "pallas"
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def choose(mesh: Mesh, layout: Layout, rule: UpdateRule) -> str:
    """The variant for a table: the one asked for where it can be, else the first that suits the platform."""
    able = [variant for variant in VARIANTS if possible(variant, mesh, layout, rule)]
    asked = _asked(VARIANT, VARIANTS)
    if asked in able:
        return asked
    if platform(mesh) == "tpu" and "pallas" in able:
        return "pallas"
    return able[0]  # ffi before xla


def possible(variant: str, mesh: Mesh, layout: Layout, rule: UpdateRule) -> bool:
    """Whether a variant can update tables of that form by that rule on these devices."""
    if variant == "ffi":
        return not layout.line.masked and direct.possible(mesh, rule, layout.dim)
    if variant == "pallas":
        # Rounding to 16 bits and whole rows ask for divisions and shuffles that a vector unit has not.
        tiled = layout.lanes == FORMS["tiled"] and not layout.bfloat16
        return tiled and rule.algorithm not in BY_ROW and platform(mesh) in ("tpu", "cpu")
    return True


def platform(mesh: Mesh) -> str:
    name: str = mesh.devices.flat[0].platform
    return name


def _asked(variable: str, known: tuple[str, ...]) -> str | None:
    asked = os.environ.get(variable) or None
    if asked is not None and asked not in known:
        raise ConfigError(f"{variable}: expected one of {', '.join(known)}, got '{asked}'")
    return asked
