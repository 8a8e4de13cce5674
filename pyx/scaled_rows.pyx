"""Combines looked-up rows into activations: each row times its scale is added to its sample, without an array of them.

The backward pass needs no kernel of its own: ``coalesce`` folds each sample's row times the scale of the lookup.
"""

from ._types cimport index_t
from .coalesce cimport CHUNK, row_t

cdef extern from "row_kernels.h":
    int fold_rows_f32(float* sums, long dim, const index_t* order, const float** rows, const float* scales,
                      long n) nogil


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
    cdef const float* scales = NULL
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
            if gains is not None:
                scales = &gains[start]
            fold_rows_f32(&out[0, 0], dim, &samples[start], <const float**>chunk, scales, num_chunk)
            start += num_chunk
    if outside:
        raise ValueError("a sample or a row lies outside its array")
