# One owner's share of a table's sums, and what comes before the fold of a frame's rows: split them, look up their ids.
from libc.stdint cimport int64_t, uint8_t, uint32_t

from ._types cimport id_t, index_t, real_t
from .id_table cimport IdBuckets


ctypedef const char* row_t

cdef enum:
    MOST_PARTS = 64
    CHUNK = 1024           # rows looked at in one go
    NUM_GROUPS = 8         # of slots: each slot is in one, whose rows are folded by one thread at a time


cdef struct Source:        # rows of one table, in arrival order, wherever they lie
    const id_t* ids
    const char* rows       # float32 or float64, each row contiguous
    Py_ssize_t stride      # bytes from one row to the next
    const index_t* row_index  # of each id, or NULL: all rows in order
    const float* scales    # the factor of each row, or NULL: none; only where the rows are float32
    Py_ssize_t num_rows


cdef struct Frame:         # the rows of one table in a frame, and how they are summed
    const Source* sources
    Py_ssize_t num_sources, dim
    index_t number
    bint wide              # float64, not float32
    bint strict            # a sum that is not finite makes its row bad
    double harmless        # up to this magnitude of the values, no sum can leave the finite range
    int isa                # of the loops: vectors.h


cdef struct Mark:          # in how many frames an id occurred, and in which last
    index_t frame
    index_t count


cdef enum:
    OLD = 0                # the run that is counted has seen this id before
    FRESH = 1              # it has not
    CARRIED = 2            # held since before that run: counts when it comes again


cdef struct Vocabulary:
    id_t size              # 0: unknown, every int64 may be an id
    uint32_t* entries      # of the direct map; NULL: every part hashes its ids
    uint32_t base, run_base
    uint8_t* seen          # a bit per id of a known vocabulary that is hashed: the run that is counted has seen it


cdef struct Space:         # memory for what the parts of a table hold, one part after the other
    id_t* ids
    uint8_t* first_seen
    char* sums
    Mark* marks            # NULL: all ids are of the first frame, or no mean is needed
    index_t* rows          # how many rows each id has; NULL: not counted
    Py_ssize_t num_ids     # so many fit


cdef struct Part:
    IdBuckets buckets      # where ids are hashed
    bint search_first      # where they are not: whether most ids of the last chunk were held
    # Where its share of the table's space begins, and how many ids fit.
    id_t* ids              # in order of first appearance
    uint8_t* first_seen    # OLD, FRESH or CARRIED
    Mark* marks
    index_t* rows
    char* sums
    Py_ssize_t room
    uint32_t* slots        # of the frame's rows, in order; NEW_ID: the row is the first of its id. NULL: rows are split
    Py_ssize_t num_ids
    Py_ssize_t num_carried
    Py_ssize_t num_distinct
    double largest         # magnitude of a sum since nothing was held; infinite: one was not finite
    # Of the frame that is added. Atomic: how many slots have been written, and ALL_DONE more after the last one; whether
    # all rows have been taken by threads; and the lock of the others.
    int64_t progress
    int all_taken, lock
    int num_folding                   # threads that fold rows of the part, or wait for some
    uint32_t taken                    # a bit per group of slots: a thread folds rows of it
    int64_t[NUM_GROUPS] next_rows     # of each group: those before it have been folded or taken


cdef struct Split:         # the rows of a frame by the parts that own their ids, where there are several
    # Of a stripe the rows of part 0 come first, in order, then those of part 1, and so on.
    id_t* ids              # NULL: ids fit 32 bits, and lie in slots until these are found
    uint32_t* slots
    row_t* rows
    float* scales          # NULL: no factors
    uint32_t* ends         # of the rows of each part of each stripe
    const index_t* starts  # the rows before each source of the frame
    Py_ssize_t num_rows, rows_per_stripe, num_stripes, num_parts
    Py_ssize_t[MOST_PARTS] order    # of the parts: the one with the most rows comes first
    int64_t num_left       # atomic: stripes that are not split, and one more until the parts have room
    Part* parts
    Space spare            # where they move if one has no room for its rows
    Py_ssize_t row_bytes
    bint moved


cdef struct Place:         # of the next row of a part: a stripe, and where in the split rows
    Py_ssize_t stripe, at


cdef inline void divide(const Part* part, real_t* sums, Py_ssize_t dim) noexcept nogil:
    """Divide each sum of a part that has marks by the number of frames of its id, converted to the sums' type."""
    cdef Py_ssize_t i, c
    for i in range(part.num_ids):
        for c in range(dim):
            sums[i * dim + c] /= <real_t>part.marks[i].count


cdef double harmless(double largest, Py_ssize_t num_rows, bint wide) noexcept nogil
cdef void part_begin(Part* part) noexcept nogil
cdef Py_ssize_t space_for(Py_ssize_t num_ids, Py_ssize_t num_parts) noexcept nogil
cdef bint make_room(Part* parts, Py_ssize_t num_parts, const Py_ssize_t* num_rows, const Space* spare,
                    Py_ssize_t row_bytes) noexcept nogil
cdef int part_find(Part* part, const Vocabulary* vocabulary, const Frame* frame, const int* stop) noexcept nogil
cdef void split_begin(Split* split, Py_ssize_t num_rows, Py_ssize_t num_parts) noexcept nogil
cdef int split_stripe(Split* split, const Vocabulary* vocabulary, const Frame* frame, Py_ssize_t stripe) noexcept nogil
cdef bint is_split(const Split* split) noexcept nogil
cdef Place first_place(const Split* split, Py_ssize_t number) noexcept nogil
cdef Py_ssize_t neighbours(const Split* split, Py_ssize_t number, Place* place, Py_ssize_t most) noexcept nogil
cdef void part_find_split(Part* part, const Vocabulary* vocabulary, const Split* split, Py_ssize_t number, index_t frame,
                          const int* stop) noexcept nogil
cdef bint outside(int isa, const id_t* ids, Py_ssize_t n, id_t vocabulary_size) noexcept nogil
cdef void part_undo(Part* part, const Vocabulary* vocabulary) noexcept nogil
cdef void part_carry(Part* part) noexcept nogil
cdef void part_clear(Part* part, const Vocabulary* vocabulary) noexcept nogil
