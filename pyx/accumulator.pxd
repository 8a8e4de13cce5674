# What Intake needs of an accumulator: its parts, and the rows of the frame.
from ._types cimport index_t
from .gradient_blocks cimport GradientBlocks
from .part_memory cimport PartMemory


cdef int isa_of(str target) except -1


cdef class Accumulator(PartMemory):
    cdef readonly Py_ssize_t dim
    cdef readonly object dtype
    cdef readonly Py_ssize_t num_rows    # of whole frames since start_counting
    cdef Py_ssize_t rows_begun
    cdef GradientBlocks blocks           # the frame between begin and end
    cdef int begin(self, GradientBlocks blocks, index_t frame, Py_ssize_t num_parts, Py_ssize_t room=*,
                   Py_ssize_t longest=*, Py_ssize_t most=*) except -1
    cdef int end(self) except -1
    cdef int end_steps(self, Py_ssize_t num_rows, Py_ssize_t most_ids) except -1
    cdef int cancel(self) except -1
    cdef int undo(self) except -1
    cpdef tuple drain(self, bint mean=*)
    cpdef tuple sums(self)
    cdef int _clear(self) except -1
