"""Runs of equal neighbours in a column, found at the speed at which memory is read.

The rows of one table are usually neighbours, and so are lists of equal length. The reader validates a run once
instead of each of its rows.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint32_t, uint64_t

ctypedef fused code_t:
    int8_t
    int16_t
    int32_t
    int64_t

# Unsigned: the difference of descending offsets wraps, which C defines, and length_runs refuses it.
ctypedef fused offset_t:
    uint32_t
    uint64_t

cdef enum:
    BLOCK = 64  # entries compared without a branch, so that the compiler vectorizes the loop


def equal_runs(const code_t[::1] codes not None, Py_ssize_t max_runs):
    """Return the runs of equal neighbours, or None if there are more than ``max_runs``.

    codes : int8, int16, int32 or int64, shape (n,)
    Returns a list of (start, stop, code): every entry of codes[start:stop] is ``code``.
    """
    cdef Py_ssize_t start = 0, stop, k, n = codes.shape[0]
    cdef const code_t* values = &codes[0] if n else NULL
    cdef code_t code, difference
    runs = []
    while start < n:
        if len(runs) == max_runs:
            return None
        code, stop = values[start], start + 1
        while stop + BLOCK <= n:
            difference = 0
            for k in range(BLOCK):
                difference |= values[stop + k] ^ code
            if difference:
                break
            stop += BLOCK
        while stop < n and values[stop] == code:
            stop += 1
        runs.append((start, stop, code))
        start = stop
    return runs


def length_runs(const offset_t[::1] offsets not None, uint64_t num_values, Py_ssize_t max_runs):
    """Return the runs of neighbouring lists of equal length, or None if the offsets are invalid.

    offsets : uint32 or uint64, shape (n + 1,): list i has the values offsets[i] to offsets[i + 1] - 1
    num_values : number of values of all lists; offsets must not exceed it
    Returns a list of (start, stop, length): each list from ``start`` to ``stop`` - 1 has ``length`` values. None also
    if there are more than ``max_runs``, and if offsets are empty or descend.
    """
    cdef Py_ssize_t start = 0, stop, k, n = offsets.shape[0] - 1
    cdef const offset_t* bounds
    cdef offset_t length, difference
    if n < 0:
        return None
    bounds = &offsets[0]
    runs = []
    while start < n:
        length, stop = bounds[start + 1] - bounds[start], start + 1
        while stop + BLOCK <= n:
            difference = 0
            for k in range(BLOCK):
                difference |= (bounds[stop + k + 1] - bounds[stop + k]) ^ length
            if difference:
                break
            stop += BLOCK
        while stop < n and <offset_t>(bounds[stop + 1] - bounds[stop]) == length:
            stop += 1
        # A difference that wrapped fails here: the lists of the run must end at bounds[stop], within num_values.
        if bounds[start] > num_values or <uint64_t>length > (num_values - bounds[start]) // <uint64_t>(stop - start):
            return None
        if bounds[stop] != bounds[start] + <uint64_t>length * <uint64_t>(stop - start) or len(runs) == max_runs:
            return None
        runs.append((start, stop, length))
        start = stop
    return runs
