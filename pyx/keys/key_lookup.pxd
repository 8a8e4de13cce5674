# The keys of an opening, chunk by chunk or shard by shard.
from penstock.pyx.keys.shard_decisions cimport Opening

cdef int find_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef int list_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef Py_ssize_t place_chunks(const Opening* opening) noexcept nogil
cdef int deal_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef int find_absent(const Opening* opening, Py_ssize_t s) noexcept nogil
cdef void take_back(const Opening* opening, bint decided) noexcept nogil
cdef int count_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
