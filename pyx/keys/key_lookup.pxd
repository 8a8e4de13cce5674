# The keys of an opening, chunk by chunk.
from penstock.pyx.keys.shard_decisions cimport Opening

cdef int find_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef void unstamp_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef int count_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil
cdef void sort_by_shard(const Opening* opening) noexcept nogil
