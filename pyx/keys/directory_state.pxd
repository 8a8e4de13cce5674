# The entries of a directory in order, and what was saved back into it.
from libc.stdint cimport int32_t, int64_t, uint32_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.key_shards cimport KeyEntry, Shards

cdef Py_ssize_t sorted_entries(const Shards* shards, Py_ssize_t s, bint expired, KeyEntry* out) noexcept nogil
cdef sorted_candidates(Shards* shards, Py_ssize_t n)
cdef restore_keys(Shards* shards, const id_t[::1] keys, const uint32_t[::1] last, const int32_t[::1] saved)
cdef restore_candidates(Shards* shards, const id_t[::1] keys, const int32_t[::1] count, const uint32_t[::1] last,
                        const signed char[::1] generation)
cdef saved_removed(const Shards* shards)
cdef int restore_removed(Shards* shards, const int64_t[::1] size, const unsigned char[::1] bits,
                         const uint32_t[::1] prints) except -1
