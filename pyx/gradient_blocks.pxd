# Where the rows of a frame lie.
from .coalesce cimport Source


cdef class GradientBlocks:
    cdef Source* sources         # in arrival order
    cdef Py_ssize_t num_sources
    cdef object _arrays          # that the sources look into
    cdef Py_ssize_t point_to(self, blocks, Py_ssize_t dim, bint wide) except -1
    cdef void clear(self)
