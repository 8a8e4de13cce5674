"""Squares of gradients: of each row summed in one order, of all rows exactly.

A square of a float32 is exact in float64. A row's sum of them depends on the row alone, since its order is fixed; the
sum of all rows is one of integers, which depends on no order. ``penstock.core.gradient_norms`` rounds it, once.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef extern from "row_norms.h" nogil:
    int best_isa()
    void squares_of_rows(int isa, const float* rows, long n, long dim, double* out)
    long scale_rows(int isa, float* rows, long n, long dim, double most, double epsilon, double* squares)

cdef enum:
    EXPONENTS = 2048  # of float64
    MANTISSA_BITS = 52

# Limbs of an exact sum, uint64 (NUM_EXPONENTS, 2): by exponent the low and the high halves of the mantissas.
NUM_EXPONENTS = EXPONENTS


def row_squares(const float[:, ::1] rows not None, double[::1] out not None):
    """Write the sum of squares of each row: element j is in sum j % 8, and the eight are added in pairs.

    rows : float32 (n, dim); out : float64 (n,)
    """
    cdef Py_ssize_t n = rows.shape[0], dim = rows.shape[1]
    if out.shape[0] != n:
        raise ValueError(f"expected {n} sums, got {out.shape[0]}")
    if not n or not dim:
        out[:] = 0
        return
    cdef int isa = best_isa()
    with nogil:
        squares_of_rows(isa, &rows[0, 0], n, dim, &out[0])


def clip_rows(float[:, ::1] rows not None, double[::1] squares not None, double most, double epsilon):
    """Scale rows whose norm exceeds ``most`` down to it, in place, and return how many.

    rows : float32 (n, dim); squares : float64 (n,), what ``row_squares`` wrote; those of scaled rows are written anew
    epsilon : is added to a norm before it is divided by
    """
    cdef Py_ssize_t n = rows.shape[0], dim = rows.shape[1]
    cdef long count = 0
    if squares.shape[0] != n:
        raise ValueError(f"expected {n} sums, got {squares.shape[0]}")
    if not n or not dim:
        return 0
    cdef int isa = best_isa()
    with nogil:
        count = scale_rows(isa, &rows[0, 0], n, dim, most, epsilon, &squares[0])
    return count


def add_exactly(const double[::1] values not None, uint64_t[:, ::1] limbs not None):
    """Add values to limbs: finite ones of at least 0, none subnormal, and at most 2^32 of them in all.

    values : float64 (n,); limbs : uint64 (NUM_EXPONENTS, 2)
    """
    cdef Py_ssize_t i
    cdef uint64_t bits, mantissa
    cdef int64_t exponent
    if limbs.shape[0] != EXPONENTS or limbs.shape[1] != 2:
        raise ValueError(f"expected limbs of shape ({EXPONENTS}, 2), got ({limbs.shape[0]}, {limbs.shape[1]})")
    with nogil:
        for i in range(values.shape[0]):
            memcpy(&bits, &values[i], sizeof(bits))
            if not bits:
                continue
            exponent = (bits >> MANTISSA_BITS) & (EXPONENTS - 1)
            mantissa = (bits & ((<uint64_t>1 << MANTISSA_BITS) - 1)) | (<uint64_t>1 << MANTISSA_BITS)
            limbs[exponent, 0] += mantissa & <uint64_t>0xFFFFFFFF
            limbs[exponent, 1] += mantissa >> 32
