"""The only conversion of a Python number to the float32 that a proto holds."""

from __future__ import annotations

import math
import struct


def float32(value: float) -> float:
    """Return ``value`` rounded to float32, as a Python float; one too large becomes infinite, as in TensorFlow.

    A configuration built from Python floats must equal the same configuration after a round trip through a proto.
    """
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
