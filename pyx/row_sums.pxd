# The second phase in which a frame enters a part of a table: its rows are folded into the sums.
from .coalesce cimport Frame, Part, Split, Vocabulary

cdef enum:
    NOTHING = 0          # no rows that this thread could take
    BAD = 1              # a value or a sum is not finite
    WORKED = 2
    DISTURBED = 3        # this thread had no processor for a while, and others fold the rest at less cost without it
    LARGE = 4            # values so large that a sum may leave the finite range

cdef int part_fold(Part* part, const Frame* frame, const int* stop) noexcept nogil
cdef int part_fold_split(Part* part, const Frame* frame, const Split* split, Py_ssize_t number, const int* stop) noexcept nogil
cdef int part_check(const Frame* frame, const Vocabulary* vocabulary, Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil
