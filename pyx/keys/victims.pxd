# Victims of an eviction: the scores of a shard's entries, and the lowest of them.
from libc.stdint cimport uint32_t

from penstock.pyx.keys.key_shards cimport KeyEntry
from penstock.pyx.keys.shard_decisions cimport Opening

cdef enum:
    BUCKETS = 512           # of scores


cdef struct Lowest:         # of a shard's scores
    Py_ssize_t num          # how many
    uint32_t low, most
    int shift               # 0: a bucket has one score
    Py_ssize_t[BUCKETS + 1] places


cdef Py_ssize_t score_all(const Opening* opening, const KeyEntry* entries, uint32_t* scores) noexcept nogil
cdef void lowest_scores(const uint32_t* scores, size_t slots, Py_ssize_t wanted, Lowest* lowest) noexcept nogil


cdef inline Py_ssize_t lowest_place(Lowest* lowest, uint32_t score) noexcept nogil:
    """The place of the next entry of this score among the lowest, which are in order but for those of one bucket."""
    cdef Py_ssize_t* place = &lowest.places[(score - lowest.low) >> lowest.shift]
    place[0] += 1
    return place[0] - 1
