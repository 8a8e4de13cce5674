"""The variants that update a table's rows, and their line formats, by platform unless the environment overrides them.

| variant | where | implementation |
|---|---|---|
| ffi | CPU, one row per line | FFI handlers, pyx/update.pyx (cpu_ffi.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | kernel for the TensorCore (pallas/tensorcore.py) |
| sparsecore | on request, on v5p, v6e, tpu7x; else interpreted | kernel for SparseCores (pallas/sparsecore.py) |
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
# Device kinds of the TPUs with SparseCores that jax can program: v5p, v6e and tpu7x.
SPARSE = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")
FORMS = {"plain": 1, "tiled": 128}
# Environment variables that override variant and layout, for tests, benchmarks and debugging.
VARIANT, FORM = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT"


def lanes(mesh: Mesh) -> int:
    """Return the unit of the width of a table's lines on these devices. Raises ConfigError for a bad override."""
    asked = _asked(FORM, tuple(FORMS))
    if asked is not None:
        return FORMS[asked]
    on_tpu = platform(mesh) == "tpu" or _asked(VARIANT, VARIANTS) in KERNELS
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def choose(mesh: Mesh, layout: Layout, rule: UpdateRule) -> str:
    """Return the variant for a table: the requested one if possible, else the first that suits the platform."""
    asked = _asked(VARIANT, VARIANTS)
    if asked is not None and possible(asked, mesh, layout, rule):
        return asked
    usual = ("pallas", "xla") if platform(mesh) == "tpu" else ("ffi", "xla")
    return next(variant for variant in usual if possible(variant, mesh, layout, rule))


def formed(layout: Layout, variant: str) -> Layout:
    """Return the layout in the format that suits the variant."""
    return replace(layout, halved=variant == "xla" and layout.lanes == FORMS["tiled"])


def possible(variant: str, mesh: Mesh, layout: Layout, rule: UpdateRule) -> bool:
    """Return whether a variant can update tables of that layout by that rule on these devices."""
    if variant == "ffi":
        return not layout.line.masked and cpu_ffi.possible(mesh, rule, layout.dim)
    if variant in KERNELS:
        # Rounding to bfloat16 and rules on whole rows need divisions and shuffles that a vector unit lacks.
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
