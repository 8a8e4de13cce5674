"""Expands gradients of activations into gradients of looked-up rows and sums them in one go.

A lookup's gradient is gain * (its sample's row): one row of the activations' gradients serves all the ids that
its sample looked up, and is in the first-level cache while it does. Written out, those rows would be as many as the
lookups; here no array of that size is ever made. The bits are those of writing them out: a product is rounded to
float32 before it is added, and the first row of an id is a copy of its product. Twin: ``reference.coalesce_expanded``.
"""

from libc.stdint cimport uint64_t

from ._types cimport index_t
from .parts cimport CHUNK, Source, is_of_part, row_t

cdef extern from "gained_rows.h":
    int fold_gained_f32(float* sums, long dim, const index_t* order, const float** rows, const float* gains,
                        long n) nogil
    int odd_gained_f32(const char* rows, long stride, const index_t* which, const float* gains, long n, long dim) nogil


cdef bint fold_expanded(const Source* source, Py_ssize_t start, Py_ssize_t num_chunk, Py_ssize_t number,
                        Py_ssize_t num_parts, float* sums, Py_ssize_t dim, const index_t* order, row_t* rows,
                        Py_ssize_t num_mine) noexcept nogil:
    """Fold the rows of a chunk that part ``number`` owns. Returns whether a product is not finite.

    order : the dense index of each, ~index where its id is new; rows : their samples' gradients
    """
    cdef float[CHUNK] picked
    cdef const float* gains = source.gains + start
    cdef Py_ssize_t i, k = 0
    cdef uint64_t mask = num_parts - 1
    if num_parts > 1:
        for i in range(num_chunk):
            # No branch, as where the rows are picked; what is written for another's row is written over.
            picked[k] = gains[i]
            k += is_of_part(source.ids[start + i], mask, number)
        gains = picked
    return fold_gained_f32(sums, dim, order, <const float**>rows, gains, num_mine)


cdef bint odd_expanded(const Source* source, Py_ssize_t first, Py_ssize_t n, Py_ssize_t dim) noexcept nogil:
    """Whether a product of n rows from the first on is not finite."""
    return odd_gained_f32(source.rows if source.which != NULL else source.rows + first * source.stride, source.stride,
                          source.which + first if source.which != NULL else NULL, source.gains + first, n, dim)
