# What Intake needs of an accumulator: where its parts and the rows of the frame lie.
from libc.stdint cimport uint8_t

from ._types cimport index_t
from .gradient_blocks cimport GradientBlocks
from .id_map cimport IdBits, IdMap
from .buffer_pool cimport Block, Pool
from .coalesce cimport Index, Part

cdef enum:
    MOST_PARTS = 64


cdef class Accumulator:
    cdef readonly Py_ssize_t dim
    cdef readonly object dtype
    cdef readonly Py_ssize_t num_parts   # of what is held now
    cdef readonly Py_ssize_t num_rows    # of whole frames since start_counting
    cdef Py_ssize_t rows_begun, row_bytes
    cdef bint wide, count
    cdef readonly IdMap map              # None where ids are hashed
    cdef Index index
    cdef IdBits seen
    cdef Part[MOST_PARTS] parts
    cdef list _ids, _sums, _first_seen, _marks   # the blocks that a part's pointers look into, by part
    cdef Pool _pool
    cdef index_t first_frame
    cdef GradientBlocks blocks             # the frame between begin and end
    cdef Py_ssize_t held(self) noexcept
    cdef Py_ssize_t num_bytes(self) noexcept
    cdef int begin(self, list blocks, index_t frame, Py_ssize_t num_parts) except -1
    cdef int end(self) except -1
    cdef int cancel(self) except -1
    cdef int undo(self) except -1
    cpdef tuple drain(self, bint mean=*)
    cpdef tuple sums(self)
    cdef int _clear(self) except -1
    cdef int _set_parts(self, Py_ssize_t num_parts) except -1
    cdef int _reserve(self, Py_ssize_t p, Py_ssize_t num_rows) except -1
    cdef Block _grown(self, block, Py_ssize_t used, Py_ssize_t room, Py_ssize_t width)
    cdef int _start_marks(self, Py_ssize_t p) except -1
