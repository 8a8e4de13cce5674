"""Plain columns of a record batch, read where they lie through Arrow's C data interface.

An Array of pyarrow takes longer to make than a hundred rows to sum; the interface gives pointers. It does not say how
large the buffers are: a batch has been validated before it comes here. What it says of types is not asked for anew
either: who calls knows the schema.
"""

import numpy as np

from cpython.buffer cimport PyBUF_FORMAT
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint8_t

cdef object INT64 = np.dtype(np.int64)
cdef object FLOAT32 = np.dtype(np.float32)
cdef char* BYTES = "B"


cdef struct ArrowArray:         # Arrow's own, as its specification has it
    int64_t length, null_count, offset, n_buffers, n_children
    const void** buffers
    ArrowArray** children
    ArrowArray* dictionary
    void (*release)(ArrowArray*) noexcept
    void* private_data


cdef class Memory:
    """Bytes with an external owner, which stays alive as long as an array views them."""
    cdef void* begin
    cdef Py_ssize_t size
    cdef Py_ssize_t[1] strides
    cdef object owner

    def __getbuffer__(self, Py_buffer* view, int flags):
        self.strides[0] = 1
        view.buf, view.obj, view.len, view.readonly = self.begin, self, self.size, 1
        view.itemsize, view.ndim, view.format = 1, 1, BYTES if flags & PyBUF_FORMAT else NULL
        view.shape, view.strides, view.suboffsets, view.internal = &self.size, self.strides, NULL, NULL


def plain_rows(batch not None, Py_ssize_t num_columns, Py_ssize_t id_at, Py_ssize_t gradient_at, Py_ssize_t step_at,
               Py_ssize_t width):
    """The ids, gradients and steps of a batch, as read-only views.

    batch : what its ``__arrow_c_array__`` gave second; valid, of num_columns columns
    id_at, step_at : columns of int64, step_at -1 for none; gradient_at : one of lists of width float32, -1 for none
    Returns int64 (n,), float32 (n, width), and int64 (n,) or None; None where something is null, or not aligned, or not
    as it should be.
    """
    cdef ArrowArray* whole = <ArrowArray*>PyCapsule_GetPointer(batch, "arrow_array")
    cdef ArrowArray* lists
    cdef int64_t num_rows = whole.length
    if whole.release == NULL or whole.n_children != num_columns or whole.offset != 0 or has_null(whole):
        return None
    if not (0 <= id_at < num_columns and -1 <= gradient_at < num_columns and -1 <= step_at < num_columns):
        return None
    ids = numbers(batch, whole.children[id_at], 0, num_rows, INT64, 8)
    if gradient_at < 0:
        values, width = np.empty(0, FLOAT32), 0
    else:
        lists = whole.children[gradient_at]
        if lists.n_children != 1 or lists.length != num_rows or has_null(lists):
            return None
        values = numbers(batch, lists.children[0], lists.offset * width, num_rows * width, FLOAT32, 4)
    steps = None if step_at < 0 else numbers(batch, whole.children[step_at], 0, num_rows, INT64, 8)
    if ids is None or values is None or (steps is None) != (step_at < 0):
        return None
    if whole.children[id_at].length != num_rows or (step_at >= 0 and whole.children[step_at].length != num_rows):
        return None
    return ids, values.reshape(num_rows, width), steps


cdef object numbers(owner, const ArrowArray* column, int64_t first, int64_t num, dtype, Py_ssize_t itemsize):
    """So many numbers of a column, from ``first`` on; None where one is null, or they are too few or not aligned."""
    cdef Memory memory
    if column.n_buffers != 2 or column.n_children or first + num > column.length or has_null(column):
        return None
    if num == 0:
        return np.empty(0, dtype)
    memory = Memory.__new__(Memory)
    memory.owner, memory.size = owner, num * itemsize
    memory.begin = <char*>column.buffers[1] + (column.offset + first) * itemsize
    if column.buffers[1] == NULL or <size_t>memory.begin % itemsize:
        return None
    return np.frombuffer(memory, dtype)


cdef bint has_null(const ArrowArray* array) noexcept nogil:
    """Whether a bit of its bitmap is not set, whatever it says of their number."""
    cdef const uint8_t* bits
    cdef int64_t bit, end = array.offset + array.length
    if array.n_buffers < 1 or array.buffers[0] == NULL:
        return False
    bits, bit = <const uint8_t*>array.buffers[0], array.offset
    while bit < end:
        if bit % 8 == 0 and bit + 8 <= end:
            if bits[bit // 8] != 255:
                return True
            bit += 8
        else:
            if not bits[bit // 8] >> (bit % 8) & 1:
                return True
            bit += 1
    return False
