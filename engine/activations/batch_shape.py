"""How many samples, and positions of a sequence, the input shape of a feature gives a batch."""

from __future__ import annotations

import math

from penstock.config.specs import FeatureSpec
from penstock.errors import UsageError

PAD = "pad a short last batch with samples that have no ids (an empty list each), or drop it"


def num_samples(feature: FeatureSpec) -> int:
    """Rows of its activation: what its lookups are combined into. Of a sequence, samples times positions."""
    return math.prod(feature.input_shape)


def samples_shape(feature: FeatureSpec) -> tuple[int, ...]:
    """Its input shape, of a sequence without the axis of positions."""
    return feature.input_shape[:-1] if feature.sequence_length else feature.input_shape


def positions_of_lists(feature: FeatureSpec, num_lists: int, who: str, what: str) -> int:
    """How many positions each of so many lists of ids fills; 0: its ids are combined. UsageError where none fits.

    Lists for the leading axes of the shape only are sequences over the others, as TensorFlow has it of RaggedTensors.
    """
    shape = feature.input_shape
    leading = samples_shape(feature)
    for axes in range(len(leading), 0, -1):
        if math.prod(shape[:axes]) == num_lists:
            return math.prod(shape[axes:]) if axes < len(shape) else 0
    check_num_samples(num_lists, math.prod(leading), who, what)
    return 0


def check_num_samples(got: int, wanted: int, who: str, what: str) -> None:
    """UsageError where a batch has another number of samples than the configuration says."""
    if got != wanted:
        hint = f"; {PAD}" if got < wanted else ""
        raise UsageError(f"{who}: expected {what} for {wanted} samples (its input shape), got {got}{hint}")
