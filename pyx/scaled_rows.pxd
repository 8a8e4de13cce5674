# Gradients of lookups that are never written out: each is its sample's row times its gain, folded as it is made.
from ._types cimport index_t
from .coalesce cimport Source, row_t

cdef bint fold_expanded(const Source* source, Py_ssize_t start, Py_ssize_t num_chunk, Py_ssize_t number,
                        Py_ssize_t num_parts, float* sums, Py_ssize_t dim, const index_t* order, row_t* rows,
                        Py_ssize_t num_mine) noexcept nogil
cdef bint odd_expanded(const Source* source, Py_ssize_t first, Py_ssize_t n, Py_ssize_t dim) noexcept nogil
