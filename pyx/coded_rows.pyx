"""Runs of rows of one table in a batch of several, found at the speed at which memory is read.

The rows of one table are usually neighbours. The reader validates a run once instead of each of its rows.
"""

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint32_t, uint64_t

ctypedef fused code_t:
    int8_t
    int16_t
    int32_t
    int64_t

# Unsigned: the difference of descending offsets wraps, which C defines, and first_value refuses it.
ctypedef fused offset_t:
    uint32_t
    uint64_t

cdef enum:
    BLOCK = 64  # entries compared without a branch, so that the compiler vectorizes the loop


cdef class CodedRows:
    """The rows of a batch whose table column has codes. ``plain_batches`` makes them, of at least one row.

    They are aligned and inside the memory that this keeps, but codes and offsets may have any values.
    """

    @property
    def addresses(self):
        """Where ids and values lie, and how many values there are."""
        return <size_t>self.ids, <size_t>self.values, self.num_values

    def table_runs(self, const int64_t[::1] dims not None, Py_ssize_t max_runs):
        """Return the runs of rows of one table: (start, stop, code, first value) each.

        dims : int64, by code: the values of a row of its table, at least 1; -1: the code has no table
        None: there are more than ``max_runs``, or a code has no table, or a row has another number of values
        """
        cdef Py_ssize_t start = 0, stop, n = self.num_rows
        cdef int64_t code, first
        runs = []
        while start < n:
            if len(runs) == max_runs:
                return None
            stop = self._end_of_table(start, &code)
            if not 0 <= code < dims.shape[0] or dims[code] < 1:
                return None
            first = self._first_value(start, stop, dims[code])
            if first < 0:
                return None
            runs.append((start, stop, code, first))
            start = stop
        return runs

    def step_runs(self):
        """Return the runs of rows of one step: (start, stop, step) each. None: there is no column of steps."""
        cdef const int64_t* steps = <const int64_t*>self.steps
        cdef Py_ssize_t start = 0, stop
        if steps == NULL:
            return None
        runs = []
        while start < self.num_rows:
            stop = end_of_run(steps, start, self.num_rows)
            runs.append((start, stop, steps[start]))
            start = stop
        return runs

    cdef Py_ssize_t _end_of_table(self, Py_ssize_t start, int64_t* code) noexcept:
        """Return where the run ends that begins at ``start``. code : OUT its code"""
        if self.code_bytes == 1:
            code[0] = (<const int8_t*>self.codes)[start]
            return end_of_run(<const int8_t*>self.codes, start, self.num_rows)
        if self.code_bytes == 2:
            code[0] = (<const int16_t*>self.codes)[start]
            return end_of_run(<const int16_t*>self.codes, start, self.num_rows)
        if self.code_bytes == 4:
            code[0] = (<const int32_t*>self.codes)[start]
            return end_of_run(<const int32_t*>self.codes, start, self.num_rows)
        code[0] = (<const int64_t*>self.codes)[start]
        return end_of_run(<const int64_t*>self.codes, start, self.num_rows)

    cdef int64_t _first_value(self, Py_ssize_t start, Py_ssize_t stop, int64_t dim) noexcept:
        """Return where the values of some rows begin, -1 if one has not ``dim`` of them, inside the memory."""
        if self.offsets == NULL:
            return start * dim if dim == self.width else -1
        if self.offset_bytes == 4:
            return first_value(<const uint32_t*>self.offsets, start, stop, <uint64_t>dim, <uint64_t>self.num_values)
        return first_value(<const uint64_t*>self.offsets, start, stop, <uint64_t>dim, <uint64_t>self.num_values)


cdef Py_ssize_t end_of_run(const code_t* values, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """Where the run of equal values ends that begins at ``start``."""
    cdef Py_ssize_t stop = start + 1, k
    cdef code_t difference
    while stop + BLOCK <= n:
        difference = 0
        for k in range(BLOCK):
            difference |= values[stop + k] ^ values[start]
        if difference:
            break
        stop += BLOCK
    while stop < n and values[stop] == values[start]:
        stop += 1
    return stop


cdef int64_t first_value(const offset_t* bounds, Py_ssize_t start, Py_ssize_t stop, uint64_t dim,
                         uint64_t num_values) noexcept nogil:
    """Where the lists from ``start`` to ``stop`` - 1 begin; -1 where one has not the length ``dim``.

    bounds : list i has the values bounds[i] to bounds[i + 1] - 1, of which there are ``num_values``
    """
    cdef Py_ssize_t i = start, k
    cdef offset_t length = <offset_t>dim, difference
    # A difference that wrapped fails here: the lists must end at bounds[stop], within num_values.
    if bounds[start] > num_values or dim > (num_values - bounds[start]) // <uint64_t>(stop - start):
        return -1
    if bounds[stop] != bounds[start] + dim * <uint64_t>(stop - start):
        return -1
    while i + BLOCK <= stop:
        difference = 0
        for k in range(BLOCK):
            difference |= (bounds[i + k + 1] - bounds[i + k]) ^ length
        if difference:
            return -1
        i += BLOCK
    while i < stop:
        if bounds[i + 1] - bounds[i] != length:
            return -1
        i += 1
    return <int64_t>bounds[start]
