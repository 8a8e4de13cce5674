"""Add the rows of a frame to the sums of a part of a table's ids: the second of two phases, after coalesce.pyx.

A sum's slot is its index in the part. Where rows are split by part, one thread folds those of a part. Where a table has
one part, slots are in groups, and several threads may share its rows. A thread folds one turn after the other: some
thousand neighbouring rows, of all groups that no other thread is folding or of a fair share of these. Threads take the
rows of a group in order, so the sum of an id is one left fold, whichever threads add its rows and however far one is behind.
``combine`` sums looked-up rows into activations with the same loops.
"""

from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memmove

from ._types cimport index_t, real_t
from .coalesce cimport (
    CHUNK, NUM_GROUPS, Frame, Part, Place, Source, Split, Vocabulary, first_place, neighbours, outside, row_t,
)
from .id_table cimport MOST_SLOTS, NEW_ID, best_isa
from .progress cimport (
    ALL_DONE, MOMENTS, ThreadTime, is_set, lock, lost_time_since, published, set_flag, sleep_a_moment, thread_time,
    unlock,
)

cdef extern from "row_kernels.h":
    enum: MOST_AHEAD
    double fold_rows_f32(int isa, float* sums, long dim, const uint32_t* slots, const float** rows, const float* scales,
                      long n, long ahead) nogil
    double fold_rows_f64(int isa, double* sums, long dim, const uint32_t* slots, const double** rows,
                         const double* scales, long n, long ahead) nogil
    double largest_rows_f32(int isa, const char* rows, long stride, const index_t* row_index, const float* scales,
                            long n, long dim) nogil
    double largest_rows_f64(int isa, const char* rows, long stride, const index_t* row_index, const double* scales,
                            long n, long dim) nogil

cdef enum:
    TURN = 8 * CHUNK     # rows that a thread takes at a time
    ALL_GROUPS = (1 << NUM_GROUPS) - 1
    # The sums of a page are in one group, because hardware prefetchers do not cross pages. The first ids are often the
    # most frequent ones, so the sums of the first page are spread over the groups by pairs of cache lines.
    PAGE = 4096
    PAIR = 128


cdef struct Turn:        # rows that one thread folds: those from begin to end whose slots are in its groups
    uint32_t groups      # a bit for each
    int64_t begin, end
    int64_t num_known    # rows of the part whose slots part_find has published


cdef struct Buffered:    # rows about to be folded, and the rows after them, which are prefetched
    row_t[CHUNK + 2 * MOST_AHEAD] rows
    float[CHUNK + 2 * MOST_AHEAD] scales
    uint32_t[CHUNK + 2 * MOST_AHEAD] slots
    Py_ssize_t num_rows
    bint scaled
    Py_ssize_t source, first    # the source of the last row, and the row of the frame at which this source begins


cdef int part_fold(Part* part, const Frame* frame, const int* stop) noexcept nogil:
    """Fold the rows whose slots ``part_find`` has found, until no turn is left. Several threads may fold them.

    stop : set if another task has found a bad row
    Returns BAD if a sum of a strict frame is not finite; rows added before stay added. DISTURBED: this thread lost its
    processor, and other threads fold the rest.
    """
    cdef Turn turn
    cdef Buffered b
    cdef Py_ssize_t s
    cdef int outcome = NOTHING, moment = 0
    cdef bint has_turn, shared = False
    cdef double largest = 0
    cdef ThreadTime since
    b.source, b.first, b.scaled = 0, 0, False
    for s in range(frame.num_sources):
        b.scaled |= frame.sources[s].scales != NULL
    lock(&part.lock)
    part.num_folding += 1
    has_turn = next_turn(part, &turn)
    while has_turn and not is_set(stop):
        if turn.groups:
            if turn.groups != ALL_GROUPS and not shared:
                shared, since = True, thread_time()
            largest = fold_turn(&b, part, frame, &turn)
            outcome = BAD if largest == INFINITY and frame.strict else WORKED
            moment = 0
            if outcome == BAD:
                break
            # Two threads on one processor are slower than one: each reads most lines of the gradients.
            if shared and lost_time_since(since):
                outcome = DISTURBED
        else:  # other threads have all groups; do not wait long, because they may have no processor
            sleep_a_moment(moment)
            moment += 1
            shared = False
        lock(&part.lock)
        part.largest = max(part.largest, largest)
        part.taken &= ~turn.groups
        if outcome == DISTURBED and part.num_folding > 1:
            part.num_folding -= 1
            unlock(&part.lock)
            return DISTURBED
        has_turn = next_turn(part, &turn)
        if not turn.groups and moment == MOMENTS:
            break
    lock(&part.lock)
    part.num_folding -= 1
    unlock(&part.lock)
    return WORKED if outcome == DISTURBED else outcome


cdef bint next_turn(Part* part, Turn* turn) noexcept nogil:
    """Take the first rows that no thread has taken, of a fair share of the groups.

    The caller locks the part; this function unlocks it.
    turn : OUT, without groups if no rows can be taken now
    Returns whether to continue: with this turn, or to wait because other threads fold and not all rows are taken.
    """
    cdef int64_t progress = published(&part.progress)
    cdef int64_t num_known = progress & (ALL_DONE - 1)
    cdef int64_t begin = num_known
    cdef int group, num_groups = 0, num_open = 0
    cdef bint is_free, all_free
    for group in range(NUM_GROUPS):
        is_free = not part.taken >> group & 1
        num_open += part.next_rows[group] < num_known or not is_free
        if is_free:
            begin = min(begin, part.next_rows[group])
    turn.groups, turn.begin, turn.end, turn.num_known = 0, begin, min(begin + TURN, num_known), num_known
    if begin < num_known and (progress >= ALL_DONE or num_known - begin >= CHUNK):
        for group in range(NUM_GROUPS):
            if not part.taken >> group & 1 and part.next_rows[group] == begin and num_groups * part.num_folding < num_open:
                part.next_rows[group] = turn.end
                turn.groups |= 1 << group
                num_groups += 1
        part.taken |= turn.groups
    if progress >= ALL_DONE:
        begin = num_known
        for group in range(NUM_GROUPS):
            begin = min(begin, part.next_rows[group])
        if begin == num_known:
            set_flag(&part.all_taken)
    all_free = part.taken == 0
    unlock(&part.lock)
    return turn.groups != 0 or not (all_free or is_set(&part.all_taken))


cdef double fold_turn(Buffered* b, const Part* part, const Frame* frame, const Turn* turn) noexcept nogil:
    """Fold the rows of a turn. Returns the largest magnitude of a sum, infinite if one is not finite."""
    cdef int64_t begin = turn.begin, end
    cdef Py_ssize_t n, source, first
    cdef double largest = 0
    b.num_rows = 0
    if begin < b.first:
        b.source = b.first = 0
    while begin < turn.end:
        end = min(begin + CHUNK, turn.end)
        buffer_rows(b, part, frame, turn.groups, begin, end)
        begin, source, first = end, b.source, b.first
        n = max(<Py_ssize_t>0, b.num_rows - MOST_AHEAD)
        if end == turn.end:
            n = b.num_rows
            # Prefetch the rows after the turn: most often this thread takes them next.
            buffer_rows(b, part, frame, turn.groups, end, min(end + MOST_AHEAD, turn.num_known))
            b.source, b.first = source, first
        largest = max(largest, fold_buffered(b, part, frame, n))
    return largest


cdef double fold_buffered(Buffered* b, const Part* part, const Frame* frame, Py_ssize_t n) noexcept nogil:
    """Fold the first n of the rows, and keep the others. Returns the largest magnitude, as above."""
    cdef Py_ssize_t num_ahead = b.num_rows - n
    cdef double largest
    if frame.wide:
        largest = fold_rows_f64(frame.isa, <double*>part.sums, frame.dim, b.slots, <const double**>b.rows, NULL, n, num_ahead)
    else:
        largest = fold_rows_f32(frame.isa, <float*>part.sums, frame.dim, b.slots, <const float**>b.rows,
                                b.scales if b.scaled else NULL, n, num_ahead)
    memmove(b.rows, b.rows + n, num_ahead * sizeof(row_t))
    memmove(b.slots, b.slots + n, num_ahead * sizeof(uint32_t))
    if b.scaled:
        memmove(b.scales, b.scales + n, num_ahead * sizeof(float))
    b.num_rows = num_ahead
    return largest


cdef int part_fold_split(Part* part, const Frame* frame, const Split* split, Py_ssize_t number, const int* stop) noexcept nogil:
    """Fold the split rows of part ``number``, whose slots have been found, on one thread.

    stop : as above. Returns BAD if a sum of a strict frame is not finite; rows added before stay added.
    """
    cdef Buffered b
    cdef Place place = first_place(split, number)
    cdef Py_ssize_t n
    cdef double largest = 0
    b.num_rows, b.scaled = 0, split.scales != NULL
    while not is_set(stop):
        n = neighbours(split, number, &place, CHUNK + MOST_AHEAD - b.num_rows)
        while n:
            memcpy(b.rows + b.num_rows, split.rows + place.at, n * sizeof(row_t))
            memcpy(b.slots + b.num_rows, split.slots + place.at, n * sizeof(uint32_t))
            if b.scaled:
                memcpy(b.scales + b.num_rows, split.scales + place.at, n * sizeof(float))
            place.at += n
            b.num_rows += n
            n = CHUNK + MOST_AHEAD - b.num_rows
            if n:
                n = neighbours(split, number, &place, n)
        if not b.num_rows:
            break
        n = b.num_rows - MOST_AHEAD if b.num_rows == CHUNK + MOST_AHEAD else b.num_rows
        largest = max(largest, fold_buffered(&b, part, frame, n))
        if largest == INFINITY and frame.strict:
            break
    part.largest = max(part.largest, largest)
    return BAD if largest == INFINITY and frame.strict else WORKED


cdef void buffer_rows(Buffered* b, const Part* part, const Frame* frame, uint32_t groups, Py_ssize_t begin,
                      Py_ssize_t end) noexcept nogil:
    """Append the rows from ``begin`` to ``end`` whose slots are in ``groups``."""
    cdef Py_ssize_t k = begin, row, stop, n = b.num_rows, first = b.first
    cdef const Source* s = &frame.sources[b.source]
    cdef int coarse = 0, fine = 0
    while (frame.dim << coarse) * (8 if frame.wide else 4) < PAGE:
        coarse += 1
        fine += (frame.dim << coarse) * (8 if frame.wide else 4) <= PAIR
    while k < end:
        row = k - first
        while row >= s.num_rows:
            row -= s.num_rows
            first += s.num_rows
            s += 1
        stop = min(end, k + s.num_rows - row)
        if b.scaled or s.row_index != NULL:
            stop = k + 1
        if b.scaled:
            b.scales[n] = 1 if s.scales == NULL else s.scales[row]
        if s.row_index != NULL:
            row = s.row_index[row]
        n += append(b, n, part.slots + k, s.rows + row * s.stride, s.stride, stop - k, groups, coarse, fine)
        k = stop
    b.num_rows, b.first, b.source = n, first, s - frame.sources


cdef inline Py_ssize_t append(Buffered* b, Py_ssize_t room, const uint32_t* slots, const char* rows, Py_ssize_t stride,
                              Py_ssize_t num_rows, uint32_t groups, int coarse, int fine) noexcept nogil:
    """Append those of neighbouring rows whose slots are in ``groups``. Returns how many."""
    cdef Py_ssize_t k, n = 0
    cdef uint32_t slot
    cdef row_t* out_rows = b.rows + room
    cdef uint32_t* out_slots = b.slots + room
    if groups == ALL_GROUPS:
        for k in range(num_rows):
            out_rows[k], out_slots[k] = rows + k * stride, slots[k]
        return num_rows
    for k in range(num_rows):
        slot = slots[k] & ~<uint32_t>NEW_ID
        out_rows[n], out_slots[n] = rows + k * stride, slots[k]
        # No branch: a processor could not predict the group of the next row.
        n += groups >> (slot >> (coarse if slot >> coarse else fine) & (NUM_GROUPS - 1)) & 1
    return n


cdef int part_check(const Frame* frame, const Vocabulary* vocabulary, Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil:
    """Look at slice ``number`` of the rows, and add nothing.

    Returns BAD if an id is outside the vocabulary or a value is not finite; LARGE if a sum may leave the finite range:
    ``frame.harmless`` says up to which magnitude none can.
    """
    cdef Py_ssize_t s, first, n
    cdef const Source* source
    cdef const char* rows
    cdef const index_t* row_index
    cdef double largest = 0
    for s in range(frame.num_sources):
        source = &frame.sources[s]
        first = source.num_rows * number // num_parts
        n = source.num_rows * (number + 1) // num_parts - first
        if outside(frame.isa, source.ids + first, n, vocabulary.size):
            return BAD
        rows, row_index = source.rows, NULL
        if source.row_index != NULL:
            row_index = source.row_index + first
        else:
            rows += first * source.stride
        if frame.wide:
            largest = max(largest, largest_rows_f64(frame.isa, rows, source.stride, row_index, NULL, n, frame.dim))
        else:
            largest = max(largest, largest_rows_f32(frame.isa, rows, source.stride, row_index,
                                                    source.scales + first if source.scales != NULL else NULL, n, frame.dim))
        if largest == INFINITY:
            return BAD
    return WORKED if largest <= frame.harmless else LARGE


def add_finite(real_t[:, ::1] sums not None, const index_t[::1] slots not None, const real_t[:, ::1] rows not None,
               uint8_t[::1] refused not None):
    """Add rows to sums one by one, in order, but for those that take a sum out of the finite range.

    sums : float32 or float64, shape (s, dim), finite; changed in place
    slots : int64, shape (n,), the sum of each row; rows : of the same type, shape (n, dim)
    refused : uint8, shape (n,), of zeros; OUT 1 for the rows that were not added
    Twin: ``reference.overflowing_rows``.
    """
    cdef Py_ssize_t k, c
    for k in range(slots.shape[0]):
        for c in range(sums.shape[1]):
            refused[k] |= not isfinite(<real_t>(sums[slots[k], c] + rows[k, c]))
        for c in range(0 if refused[k] else sums.shape[1]):
            sums[slots[k], c] += rows[k, c]


# ---- activations: sums of looked-up rows


def combine(const float[:, ::1] rows not None, const index_t[::1] indices, const index_t[::1] samples not None,
            const float[::1] gains, float[:, ::1] out not None):
    """Add rows to the sums of their samples: out[samples[k]] += gains[k] * rows[indices[k]], in order.

    rows : float32, shape (r, dim); indices : int64, shape (n,), None: all rows in order
    samples : int64, shape (n,); gains : float32, shape (n,), None: all 1
    out : float32, shape (num_samples, dim)
    Each product is rounded to float32 before it is added, without an array of products. Twin: ``reference.combine``.
    """
    cdef Py_ssize_t n = samples.shape[0], start = 0, num_chunk, k
    cdef Py_ssize_t num_rows = rows.shape[0], num_samples = out.shape[0], dim = out.shape[1]
    cdef row_t[CHUNK] chunk
    cdef uint32_t[CHUNK] slots
    cdef int isa = best_isa()
    cdef const float* scales = NULL
    cdef index_t row
    cdef bint is_outside = num_samples > MOST_SLOTS
    if rows.shape[1] != dim or (num_rows if indices is None else indices.shape[0]) != n:
        raise ValueError("the shapes of rows, indices, samples and out do not match")
    if gains is not None and gains.shape[0] != n:
        raise ValueError("the shapes of gains and samples do not match")
    if not n or not dim:
        return
    with nogil:
        for k in range(n):
            is_outside |= not 0 <= samples[k] < num_samples
        if indices is not None:
            for k in range(n):
                is_outside |= not 0 <= indices[k] < num_rows
        while start < n and not is_outside:
            num_chunk = min(<Py_ssize_t>CHUNK, n - start)
            for k in range(num_chunk):
                row = start + k if indices is None else indices[start + k]
                chunk[k] = <row_t>(&rows[0, 0] + row * dim)
                slots[k] = <uint32_t>samples[start + k]
            if gains is not None:
                scales = &gains[start]
            fold_rows_f32(isa, &out[0, 0], dim, slots, <const float**>chunk, scales, num_chunk, 0)
            start += num_chunk
    if is_outside:
        raise ValueError("a sample or an index is out of range")
