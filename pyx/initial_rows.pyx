"""Initial rows of ids and keys anywhere in 2**64: each depends on no other one. NumPy's bits, on every machine."""

import hashlib

from libc.stdint cimport int64_t, uint64_t

from penstock.pyx._types cimport id_t

cdef extern from "philox.h":
    ctypedef struct PhiloxKey:
        uint64_t low, high
    void draw_row(PhiloxKey key, uint64_t number, int64_t dim, int normal, double first, double second,
                  float* row) noexcept nogil


def draw(const id_t[::1] keys not None, bytes key_bytes not None, bint normal, double first, double second,
         float[:, ::1] out not None):
    """Draw the row of every key into ``out``, float32 (len(keys), dim), without the GIL.

    keys : int64; key k has row number k modulo 2**64
    key_bytes : 16 bytes, as ``philox_key`` returns them
    normal : a truncated normal with the standard deviation ``first`` and the mean ``second``; else uniform from
        ``second`` on, over a width of ``first``
    """
    cdef Py_ssize_t i
    cdef PhiloxKey key
    if out.shape[0] != keys.shape[0] or len(key_bytes) != 16:
        raise ValueError(f"expected a row for each of {keys.shape[0]} keys and 16 bytes, got {out.shape[0]} rows and "
                         f"{len(key_bytes)} bytes")
    key.low, key.high = int.from_bytes(key_bytes[:8], "little"), int.from_bytes(key_bytes[8:], "little")
    if out.shape[1]:
        with nogil:
            for i in range(keys.shape[0]):
                draw_row(key, <uint64_t>keys[i], out.shape[1], normal, first, second, &out[i, 0])


def philox_key(bytes purpose, seed, str table):
    """Return 16 bytes that depend on a purpose, the seed and the table's name: a key of NumPy's Philox, little-endian."""
    return hashlib.sha256(b"penstock table %s\0%d\0%s" % (purpose, seed, table.encode())).digest()[:16]
