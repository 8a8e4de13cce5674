"""The variants that update tables, by name: backends.py says what each is."""

from __future__ import annotations

# Those that a caller may ask for, in the order of docs/tpu.md.
VARIANTS = ("auto", "xla", "pallas", "sparsecore", "host")
# Those whose steps are kernels for a TPU, which need a canary.
KERNELS = ("pallas", "sparsecore")
