# Who is evicted from a shard: scores of its entries, and which of them are the lowest.
from libc.stdint cimport uint32_t

from penstock.pyx.keys.key_shards cimport KeyEntry
from penstock.pyx.keys.shard_decisions cimport Opening

cdef Py_ssize_t score_all(const Opening* opening, const KeyEntry* entries, uint32_t* scores) noexcept nogil
cdef Py_ssize_t lowest_scores(const uint32_t* scores, size_t slots, Py_ssize_t wanted, uint32_t* most) noexcept nogil
