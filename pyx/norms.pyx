"""Squares of gradients: of each row summed in one order, of all rows exactly.

A square of a float32 is exact in float64. A row's sum of them depends on the row alone, since its order is fixed; the
sum of all rows is one of integers, which depends on no order. ``penstock.core.gradient_norms`` rounds it, once.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    LANES = 8
    EXPONENTS = 2048  # of float64
    MANTISSA_BITS = 52

# Limbs of an exact sum, uint64 (NUM_EXPONENTS, 2): by exponent the low and the high halves of the mantissas.
NUM_EXPONENTS = EXPONENTS


def row_squares(const float[:, ::1] rows not None, double[::1] out not None):
    """Write the sum of squares of each row: element j is in sum j % 8, and the eight are added in pairs.

    rows : float32 (n, dim); out : float64 (n,)
    """
    cdef Py_ssize_t i, j, k, n = rows.shape[0], dim = rows.shape[1]
    cdef double[LANES] sums
    cdef double value
    cdef const float* row
    if out.shape[0] != n:
        raise ValueError(f"expected {n} sums, got {out.shape[0]}")
    if not n or not dim:
        out[:] = 0
        return
    with nogil:
        for i in range(n):
            row, j = &rows[i, 0], 0
            for k in range(LANES):
                sums[k] = 0
            while j + LANES <= dim:
                for k in range(LANES):
                    value = row[j + k]
                    sums[k] += value * value
                j += LANES
            for k in range(dim - j):
                value = row[j + k]
                sums[k] += value * value
            out[i] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))


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
