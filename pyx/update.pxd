# A prepared step on host tables, for code without Python.
from libc.stdint cimport int64_t, uint64_t

from ._types cimport grad_t, id_t
from .buffer_pool cimport Sums
from .row_updates cimport Op, Segment, StepContext, StepWork, Table


cdef class TableRule:
    cdef Table table
    cdef object zeros
    cdef bytes name


cdef class Step:
    cdef StepWork work
    cdef StepContext context
    cdef Py_ssize_t room, room_for_sweeps, num_devices
    cdef int64_t num_rows, num_swept_rows
    cdef tuple rules, floats, counted
    cdef float** memory         # of each device, that of floats
    cdef uint64_t** counters    # of each device, those of counted; NULL: none
    cdef int64_t num_counting   # threads that have counters
    cdef object noted
    cdef uint64_t* words        # of noted, in which update_small begins and ends its steps; NULL: nowhere
    cdef object arrays, interrupt
    cdef bint is_open
    cdef int64_t num_helping
    cdef int begin_small(self, Py_ssize_t number) except -1
    cdef void update_small(self, const id_t* ids, const grad_t* grads, int64_t num_rows, float lr,
                           uint64_t step) noexcept nogil
    cdef int _do_all(self, run_tasks, int64_t threads, bint is_sweep, int64_t num_items, int64_t num_rows) except -1
    cdef int _release(self) except -1
    cdef int _begin(self, Op op) except -1
    cdef int _add(self, const Table* table, ids, values, int64_t row_floats, float lr, int64_t sweep) except -1
    cdef int _add_sums(self, const Table* table, Sums sums, float lr, int64_t sweep) except -1
    cdef Segment* _next(self, const Table* table, int64_t num_rows, float lr, int64_t sweep) except NULL
    cdef int64_t _sweep(self, const Table* table, float lr) except -1
