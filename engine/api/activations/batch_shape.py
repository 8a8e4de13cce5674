"""The number of samples, and of sequence positions, in a batch, from a feature's input shape."""

from __future__ import annotations

import math

from penstock.base.errors import UsageError
from penstock.model.config.specs import FeatureSpec

PAD = "pad a short last batch with samples that have no ids (an empty list each), or drop it"


def num_samples(feature: FeatureSpec) -> int:
    """Return the number of rows of a feature's activation; for a sequence, samples times positions."""
    return math.prod(feature.input_shape)


def samples_shape(feature: FeatureSpec) -> tuple[int, ...]:
    """Return a feature's input shape, without the axis of positions for a sequence."""
    return feature.input_shape[:-1] if feature.sequence_length else feature.input_shape


def positions_of_lists(feature: FeatureSpec, num_lists: int, name: str, role: str) -> int:
    """Return how many positions each of ``num_lists`` lists of ids fills; 0: its ids are combined.

    If lists cover only the leading axes of the shape, they are sequences over the other axes, as TensorFlow treats
    RaggedTensors. name, role : for messages. Raises UsageError if the number of lists fits no axes.
    """
    shape = feature.input_shape
    leading = samples_shape(feature)
    for axes in range(len(leading), 0, -1):
        if math.prod(shape[:axes]) == num_lists:
            return math.prod(shape[axes:]) if axes < len(shape) else 0
    check_num_samples(num_lists, math.prod(leading), name, role)
    return 0


def check_num_samples(got: int, expected: int, name: str, role: str) -> None:
    """Raise UsageError if a batch has another number of samples than the configuration."""
    if got != expected:
        hint = f"; {PAD}" if got < expected else ""
        raise UsageError(f"{name}: expected {role} for {expected} samples (its input shape), got {got}{hint}")
