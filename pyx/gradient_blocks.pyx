"""The rows of a frame on their way into an accumulator: where they lie, looked up once under the GIL."""

import numpy as np

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport free, malloc
from libc.string cimport strchr

from ._types cimport id_t, index_t
from .coalesce cimport Source


cdef class GradientBlocks:
    """Sources for code without Python, and the arrays that they look into."""

    def __dealloc__(self):
        free(self.sources)

    cdef Py_ssize_t point_to(self, blocks, Py_ssize_t dim, bint wide) except -1:
        """Note where the rows of a frame lie, and keep them. Returns how many there are.

        blocks : (ids, grads, which, gains) each, as ``Intake.begin`` describes them; dim, wide : rows of so many float64, else float32
        Raises ValueError or MemoryError.
        """
        cdef Py_ssize_t num_rows = 0
        cdef Source* sources = <Source*>malloc(max(len(blocks), 1) * sizeof(Source))
        if sources == NULL:
            raise MemoryError(f"cannot allocate {len(blocks) * sizeof(Source)} bytes for blocks")
        free(self.sources)
        self.sources, self.num_sources, self._arrays = sources, 0, blocks
        for block in blocks:
            ids, grads, which, gains = block
            if not point(&sources[self.num_sources], ids, grads, which, gains, dim, wide):
                check(ids, grads, which, dim, wide)
                if gains is not None:
                    check_gains(gains, len(ids), wide)
                raise ValueError("ids, grads, which and gains: expected arrays of this machine's own types")
            if sources[self.num_sources].num_rows:
                num_rows += sources[self.num_sources].num_rows
                self.num_sources += 1
        return num_rows

    cdef void clear(self):
        """The frame is in, or will not come."""
        self.num_sources, self._arrays = 0, None


cdef bint point(Source* s, ids, grads, which, gains, Py_ssize_t dim, bint wide) except -1:
    """Where the rows of a block lie. False where its arrays are not what is summed: ``check`` says why."""
    cdef Py_buffer view
    cdef bint fits
    cdef Py_ssize_t num_grads, itemsize = sizeof(double) if wide else sizeof(float)
    s.ids = <const id_t*>row_of_numbers(ids, b"lq", sizeof(id_t), &s.num_rows)
    if s.ids == NULL:
        return False
    PyObject_GetBuffer(grads, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    fits = (view.ndim == 2 and view.itemsize == itemsize and is_of(&view, b"d" if wide else b"f")
            and view.shape[1] == dim)
    if fits:
        s.rows, s.stride, num_grads = <const char*>view.buf, view.strides[0], view.shape[0]
        fits = s.num_rows == 0 or (
            (dim == 1 or view.strides[1] == itemsize)
            and (<size_t>s.rows | <size_t>s.stride) % itemsize == 0)
    PyBuffer_Release(&view)
    s.row_index, s.scales = NULL, NULL
    if which is not None:
        s.row_index = <const index_t*>row_of_numbers(which, b"lq", sizeof(index_t), &num_grads)
        fits = fits and s.row_index != NULL
    fits = fits and num_grads == s.num_rows
    if gains is not None:
        s.scales = <const float*>row_of_numbers(gains, b"f", sizeof(float), &num_grads)
        fits = fits and s.scales != NULL and num_grads == s.num_rows and not wide
    return fits


cdef int check(ids, grads, which, Py_ssize_t dim, bint wide) except -1:
    dtype = np.dtype(np.float64 if wide else np.float32)
    rows = ids if which is None else which
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise ValueError(f"ids: expected contiguous int64 of shape (n,), got {ids.dtype} of shape {ids.shape}")
    if grads.dtype != dtype:
        raise ValueError(f"grads: expected {dtype}, got {grads.dtype}")
    if grads.ndim != 2 or grads.shape[1] != dim or (which is None and len(grads) != len(ids)):
        raise ValueError(f"grads: expected shape ({len(ids)}, {dim}), got {grads.shape}")
    if dim > 1 and len(ids) and grads.strides[1] != grads.itemsize:
        raise ValueError("grads: rows must be contiguous")
    if not (ids.flags.aligned and grads.flags.aligned and rows.flags.aligned):
        raise ValueError("ids, grads and which: expected aligned arrays")  # C may assume that they are
    if rows.dtype != np.int64 or len(rows) != len(ids) or not rows.flags.c_contiguous:
        raise ValueError(f"which: expected contiguous int64 of shape ({len(ids)},), got {rows.dtype} {rows.shape}")


cdef int check_gains(gains, num_rows, bint wide) except -1:
    if wide:
        raise ValueError("gains: only where float32 is summed")
    if gains.dtype != np.float32 or gains.shape != (num_rows,) or not gains.flags.c_contiguous:
        raise ValueError(f"gains: expected contiguous float32 of shape ({num_rows},), got {gains.dtype} {gains.shape}")
    if not gains.flags.aligned:
        raise ValueError("gains: expected an aligned array")


cdef const void* row_of_numbers(array, const char* kinds, Py_ssize_t itemsize, Py_ssize_t* num) except? NULL:
    """Where the numbers of an array begin that lie one after the other and aligned, and how many; NULL where not so.

    Who keeps the array keeps that.
    """
    cdef Py_buffer view
    cdef void* begin = NULL
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    if (view.ndim == 1 and view.itemsize == itemsize and is_of(&view, kinds) and <size_t>view.buf % itemsize == 0
            and (view.shape[0] <= 1 or view.strides[0] == itemsize)):
        # The address of an empty array may be NULL; it is never read.
        begin, num[0] = view.buf if view.shape[0] else <void*>num, view.shape[0]
    PyBuffer_Release(&view)
    return begin


cdef bint is_of(const Py_buffer* view, const char* kinds) noexcept:
    """Whether the elements are of one of these kinds, in this machine's byte order: another one has a sign before."""
    return view.format != NULL and view.format[1] == 0 and strchr(kinds, view.format[0]) != NULL
