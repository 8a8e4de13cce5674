"""What the sanitizers must report: compiled as the kernels are, to show that they are watched."""

import numpy as np


def overrun():
    """Reads one value behind an array."""
    cdef const double[::1] values = np.zeros(100)
    cdef Py_ssize_t at = values.shape[0]
    return values[at]


def overflow():
    """Adds one to the largest int."""
    cdef int[::1] values = np.full(1, 2**31 - 1, np.intc)
    values[0] += 1
    return values[0]
