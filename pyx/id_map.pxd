# id → dense index where the vocabulary is known and not huge: four bytes per row of the table, no hashing.
#
# An entry is a number that only grows: base + index for an id that is held now. Entries below base are of openings
# before; those from run_base on, of the run that is counted now. Nothing is cleared between openings.
from libc.stdint cimport uint8_t, uint32_t

cdef class IdMap:
    cdef uint32_t* entries
    cdef Py_ssize_t size
    cdef uint32_t base, run_base
    cdef size_t num_bytes
    cdef int make_room(self, Py_ssize_t num_rows) except -1


cdef class IdBits:
    cdef uint8_t* bits
    cdef size_t num_bytes
