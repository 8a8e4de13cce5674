"""Who updates a table's rows, and in what form the table lies: by platform, unless the environment says otherwise.

| variant | where | made by |
|---|---|---|
| ffi | CPU, rows that lie by themselves | our handlers, pyx/update.pyx (direct.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | our kernel for the TensorCore (tensorcore.py) |
| sparsecore | where asked for, on v5p, v6e, tpu7x; else interpreted | our kernel for SparseCores (sparsecore.py) |
"""

from __future__ import annotations

import os
from dataclasses import replace

from jax.sharding import Mesh

from penstock.bridge import cpu_ffi
from penstock.bridge.programs import BY_ROW
from penstock.bridge.sharding import Layout
from penstock.errors import ConfigError
from penstock.updates import UpdateRule

VARIANTS = ("ffi", "xla", "pallas", "sparsecore")
KERNELS = ("pallas", "sparsecore")
# TPUs with SparseCores that jax can program, by their names for v5p, v6e and tpu7x.
SPARSE = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
FORMS = {"plain": 1, "tiled": 128}
# For whom it concerns: tests, benches, and who doubts a variant.
VARIANT, FORM = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT"


def lanes(mesh: Mesh) -> int:
    """What the width of a table's lines is a multiple of, on these devices."""
    asked = _asked(FORM, tuple(FORMS))
    if asked is not None:
        return FORMS[asked]
    on_tpu = platform(mesh) == "tpu" or _asked(VARIANT, VARIANTS) in KERNELS
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def choose(mesh: Mesh, layout: Layout, rule: UpdateRule) -> str:
    """The variant for a table: the one asked for where it can be, else the first that suits the platform."""
    asked = _asked(VARIANT, VARIANTS)
    if asked is not None and possible(asked, mesh, layout, rule):
        return asked
    usual = ("pallas", "xla") if platform(mesh) == "tpu" else ("ffi", "xla")
    return next(variant for variant in usual if possible(variant, mesh, layout, rule))


def formed(layout: Layout, variant: str) -> Layout:
    """The layout in the form that whoever updates the table likes best."""
    return replace(layout, halved=variant == "xla" and layout.lanes == FORMS["tiled"])


def possible(variant: str, mesh: Mesh, layout: Layout, rule: UpdateRule) -> bool:
    """Whether a variant can update tables of that form by that rule on these devices."""
    if variant == "ffi":
        return not layout.line.masked and cpu_ffi.possible(mesh, rule, layout.dim)
    if variant in KERNELS:
        # Rounding to 16 bits and whole rows ask for divisions and shuffles that a vector unit has not.
        tiled = layout.lanes == FORMS["tiled"] and not layout.bfloat16 and rule.algorithm not in BY_ROW
        return tiled and platform(mesh) in ("tpu", "cpu") and (variant == "pallas" or _sparse(mesh, rule))
    return True


def _sparse(mesh: Mesh, rule: UpdateRule) -> bool:
    from penstock.bridge.pallas import sparsecore

    has = platform(mesh) == "cpu" or mesh.devices.flat[0].device_kind in SPARSE
    return has and sparsecore.possible(rule)


def platform(mesh: Mesh) -> str:
    name: str = mesh.devices.flat[0].platform
    return name


def _asked(variable: str, known: tuple[str, ...]) -> str | None:
    asked = os.environ.get(variable) or None
    if asked is not None and asked not in known:
        raise ConfigError(f"{variable}: expected one of {', '.join(known)}, got '{asked}'")
    return asked
