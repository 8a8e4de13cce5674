# One owner's share of a table's sums, and the loops that fill it: chunk by chunk, look ids up, then fold rows.
from libc.stdint cimport uint8_t, uint32_t

from ._types cimport id_t, index_t
from .id_table cimport Table


ctypedef const char* row_t

cdef enum:
    CHUNK = 1024           # rows looked at in one go


cdef struct Source:        # rows of one table, in arrival order, wherever they lie
    const id_t* ids
    const char* rows       # float32 or float64, each row contiguous
    Py_ssize_t stride      # bytes from one row to the next
    const index_t* row_index  # of each id, or NULL: all rows in order
    const float* scales    # the factor of each row, or NULL: none; only where the rows are float32
    Py_ssize_t num_rows


cdef struct Mark:          # in how many frames an id occurred, and in which last
    index_t frame
    index_t count


cdef enum:
    OLD = 0                # the run that is counted has seen this id before
    FRESH = 1              # it has not
    CARRIED = 2            # held since before that run: counts when it comes again


cdef struct Index:         # id → dense index: a direct map, or hash tables (one per part) where entries is NULL
    uint32_t* entries
    uint32_t base, run_base
    uint8_t* seen          # a bit per id of a known vocabulary that is hashed
    id_t vocabulary_size   # 0: unknown, every int64 may be an id


cdef struct Part:
    Table table
    id_t* ids              # in order of first appearance
    uint8_t* first_seen    # OLD, FRESH or CARRIED
    Mark* marks            # NULL: all ids are of the first frame, or no mean is needed
    char* sums
    Py_ssize_t num_ids
    Py_ssize_t num_carried
    Py_ssize_t num_distinct


cdef int part_add(Part* part, const Index* index, const Source* sources, Py_ssize_t num_sources, Py_ssize_t dim,
                  bint wide, bint strict, index_t frame, Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil
cdef int part_check(const Index* index, const Source* sources, Py_ssize_t num_sources, Py_ssize_t dim, bint wide,
                    Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil
cdef void part_undo(Part* part, const Index* index) noexcept nogil
cdef void part_carry(Part* part) noexcept nogil
cdef void part_clear(Part* part, const Index* index) noexcept nogil
