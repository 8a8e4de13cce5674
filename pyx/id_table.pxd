# id → slot, in order of first appearance: the loops are in id_buckets.h.
from libc.stdint cimport uint8_t, uint32_t

from ._types cimport id_t

cdef extern from "id_buckets.h" nogil:
    enum:
        MOST_SLOTS
        NEW_ID
    ctypedef struct IdBuckets:
        size_t touched
        bint wide
        int isa
        uint32_t base, num_ids
    ctypedef struct Bucket:
        pass
    int best_isa()
    void id_buckets_find(IdBuckets* table, const id_t* ids, long n, id_t* held, uint32_t* slots)
    void id_buckets_clear(IdBuckets* table)
    int id_buckets_reserve(IdBuckets* table, size_t num_ids, id_t* held)
    void id_buckets_free(IdBuckets* table)


cdef class IdTable:
    cdef IdBuckets buckets
    cdef id_t* ids           # by slot
    cdef size_t room
    cdef int _make_room(self, size_t num_ids) except -1


cdef class IdBits:
    cdef uint8_t* bits
    cdef size_t num_bytes


# Where the vocabulary is known and not huge: four bytes per row of the table, no hashing.
#
# An entry is a number that only grows: base + index for an id that is held now. Entries below base are of openings
# before; those from run_base on, of the run that is counted now. Nothing is cleared between openings.
cdef class IdMap:
    cdef uint32_t* entries
    cdef Py_ssize_t size
    cdef uint32_t base, run_base
    cdef IdBits memory
    cdef int make_room(self, Py_ssize_t num_rows) except -1
