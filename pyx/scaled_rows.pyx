"""Combines looked-up rows into activations, and sums the gradients of rows that gradients of activations stand for.

Forward, ``combine`` adds each row times its gain to its sample; no array of the lookups' rows is made.

Backward, gradients of activations are expanded into gradients of looked-up rows and summed in one go.

A lookup's gradient is gain * (its sample's row): one row of the activations' gradients serves all the ids that
its sample looked up, and is in the first-level cache while it does. Written out, those rows would be as many as the
lookups; here no array of that size is ever made. The bits are those of writing them out: a product is rounded to
float32 before it is added, and the first row of an id is a copy of its product. Twin: ``reference.coalesce_expanded``.
"""

from libc.stdint cimport uint64_t

from ._types cimport index_t
from .coalesce cimport CHUNK, Source, is_of_part, row_t

cdef extern from "scaled_row_kernels.h":
    int fold_gained_f32(float* sums, long dim, const index_t* order, const float** rows, const float* gains,
                        long n) nogil
    int odd_gained_f32(const char* rows, long stride, const index_t* which, const float* gains, long n, long dim) nogil

cdef extern from "row_kernels.h":
    int fold_rows_f32(float* sums, long dim, const index_t* order, const float** rows, long n) nogil


def combine(const float[:, ::1] rows not None, const index_t[::1] which, const index_t[::1] samples not None,
            const float[::1] gains, float[:, ::1] out not None):
    """Add rows to the sums of their samples: out[samples[k]] += gains[k] * rows[which[k]], in order.

    rows : float32, shape (r, dim); which : int64, shape (n,), None: all rows in order
    samples : int64, shape (n,); gains : float32, shape (n,), None: all 1
    out : float32, shape (num_samples, dim)
    A product is rounded to float32 before it is added. Twin: ``reference.combine``.
    """
    cdef Py_ssize_t n = samples.shape[0], start = 0, num_chunk, k
    cdef Py_ssize_t num_rows = rows.shape[0], num_samples = out.shape[0], dim = out.shape[1]
    cdef row_t[CHUNK] chunk
    cdef index_t row
    cdef bint outside = False
    if rows.shape[1] != dim or (num_rows if which is None else which.shape[0]) != n:
        raise ValueError("rows, which, samples and out do not fit each other")
    if gains is not None and gains.shape[0] != n:
        raise ValueError("gains and samples do not fit each other")
    if not n or not dim:
        return
    with nogil:
        for k in range(n):
            outside |= not 0 <= samples[k] < num_samples
        if which is not None:
            for k in range(n):
                outside |= not 0 <= which[k] < num_rows
        while start < n and not outside:
            num_chunk = min(<Py_ssize_t>CHUNK, n - start)
            for k in range(num_chunk):
                row = start + k if which is None else which[start + k]
                chunk[k] = <row_t>(&rows[0, 0] + row * dim)
            if gains is None:
                fold_rows_f32(&out[0, 0], dim, &samples[start], <const float**>chunk, num_chunk)
            else:
                fold_gained_f32(&out[0, 0], dim, &samples[start], <const float**>chunk, &gains[start], num_chunk)
            start += num_chunk
    if outside:
        raise ValueError("a sample or a row lies outside its array")


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
