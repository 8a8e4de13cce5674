# What Intake needs of an accumulator: its parts, and the rows of the frame.
from ._types cimport index_t
from .buffer_pool cimport Block, Pool
from .coalesce cimport MOST_PARTS, Frame, Part, Space, Split, Vocabulary
from .gradient_blocks cimport GradientBlocks
from .id_table cimport IdBits, IdMap


cdef int isa_of(str target) except -1


cdef class Accumulator:
    cdef readonly Py_ssize_t num_parts   # of what is held now
    cdef Part[MOST_PARTS] parts
    cdef Frame frame                     # between begin and end
    cdef Split split                     # of its rows, where there are several parts
    cdef Vocabulary vocabulary
    cdef readonly IdMap map              # None where ids are hashed
    cdef IdBits seen                     # None where they are not, or the vocabulary is unknown
    cdef Py_ssize_t row_bytes
    cdef bint count, count_rows
    cdef index_t first_frame
    cdef Space space
    # The blocks of the space: ids, bytes of first_seen, sums, marks, rows; those of split.spare; those of the frame.
    cdef list _held, _spare, _of_frame
    cdef Pool _pool
    cdef Py_ssize_t held(self) noexcept
    cdef Py_ssize_t distinct(self) noexcept
    cdef Py_ssize_t bytes_per_id(self) noexcept
    cdef Py_ssize_t num_bytes(self) noexcept
    cdef int set_parts(self, Py_ssize_t num_parts) except -1
    cdef int reserve(self, Py_ssize_t num_rows) except -1
    cdef int _take_spare(self, Py_ssize_t num_ids) except -1
    cdef int _move(self) except -1
    cdef int reserve_slots(self, Py_ssize_t num_rows) except -1
    cdef void* _room_for(self, Py_ssize_t num_bytes) except NULL
    cdef int start_marks(self) except -1
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
