# The gate's counters and its rule, for code with and without Python.
from ._types cimport index_t


cdef class GateCounts:
    cdef public index_t global_step      # openings so far, or the value of the last ``set_global_step``
    cdef public index_t num_accumulated  # contributions admitted since the last opening
    cdef index_t required                # 0: the gate opens only for takers
    cdef readonly index_t max_staleness  # steps that a contribution may be behind
    cdef index_t first_step, last_step   # where it can open
    cdef bint behind(self, index_t local_step) noexcept nogil
    cdef bint due(self, index_t more) noexcept nogil
    cdef bint may_open(self) noexcept nogil
