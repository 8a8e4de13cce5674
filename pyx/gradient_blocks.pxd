# Where the rows of a frame, or of several, lie.
from ._types cimport id_t, index_t
from .coalesce cimport Source


cdef class GradientBlocks:
    cdef Source* sources         # in arrival order, none without rows
    cdef index_t* starts         # the rows before each source, and of all
    cdef readonly Py_ssize_t dim
    cdef Py_ssize_t num_sources, room
    cdef bint wide
    cdef list owners             # of the memory that the sources point to
    cdef int reserve(self, Py_ssize_t num_more) except -1
    cdef void add(self, const id_t* ids, const char* rows, Py_ssize_t stride, Py_ssize_t num_rows) noexcept
    cdef Py_ssize_t block_of(self, index_t row) noexcept nogil


cdef GradientBlocks blocks_of(blocks, Py_ssize_t dim, bint wide)
