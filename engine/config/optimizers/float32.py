"""The one place where a Python number becomes the float32 that a proto carries. Nothing else belongs here."""

from __future__ import annotations

import math
import struct


def float32(value: float) -> float:
    """``value`` rounded to float32, as a Python float; too large becomes infinite, as in TensorFlow.

    A configuration built from Python floats must mean the same as one that went through a proto.
    """
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
