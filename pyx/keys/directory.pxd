# What a plan needs of a directory.
from libc.stdint cimport int64_t

from penstock.pyx.buffer_pool cimport Pool
from penstock.pyx.keys.key_shards cimport KeyCounts, Shards


cdef class Directory:
    cdef Shards shards
    cdef readonly KeyCounts counts
    cdef readonly tuple share           # (rank, count): which of the virtual shards are here
    cdef int64_t whole_capacity    # of all shares
    cdef object plan        # the plan that is neither committed nor cancelled
    cdef Pool pool          # of the arrays of plans
    cdef int settle(self) except -1
    cpdef array(self, dtype, Py_ssize_t n)
