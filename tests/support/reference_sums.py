"""The sums of segments as engine/bridge/segment_sums.py describes them: readable, one value after the other."""

import numpy as np


def segment_sums(segments, num_segments, values, most_terms, run):
    """Return the sum of the values of every segment, float32 (num_segments, width)."""
    sums = np.zeros((num_segments, values.shape[1]), np.float32)
    for segment in range(num_segments):
        terms = list(values[segments == segment])
        while len(terms) > most_terms:
            terms = [from_left(terms[start : start + run], values.shape[1]) for start in range(0, len(terms), run)]
        sums[segment] = from_left(terms, values.shape[1])
    return sums


def from_left(terms, width):
    total = np.zeros(width, np.float32)
    for term in terms:
        total = total + term
    return total
