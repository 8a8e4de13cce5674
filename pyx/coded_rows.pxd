# The rows of a batch of several tables, where they lie.
from libc.stdint cimport int64_t


cdef class CodedRows:
    cdef const char* codes       # of the tables, signed
    cdef const char* ids
    cdef const char* offsets     # of the lists of values; NULL: all lists have the same width
    cdef const char* values
    cdef const char* steps       # NULL: there are none
    cdef Py_ssize_t code_bytes, offset_bytes
    cdef int64_t width, num_values
    cdef readonly int64_t num_rows
    cdef object owner            # of the memory
    cdef Py_ssize_t _end_of_table(self, Py_ssize_t start, int64_t* code) noexcept
    cdef int64_t _first_value(self, Py_ssize_t start, Py_ssize_t stop, int64_t dim) noexcept
