"""Folds the rows of a frame into the sums of a part: the second of two phases, after coalesce.pyx.

One thread follows the look-up and reads the gradients once, in sequence. A second one, where there is one without a task,
helps: from then on each folds the rows of separate slots. The sum of an id is one left fold, on one thread or two.
``combine`` sums looked-up rows into activations by the same loops.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memmove

from ._types cimport index_t
from .coalesce cimport CHUNK, Part, Source, Vocabulary, outside, row_t
from .id_table cimport MOST_SLOTS, NEW_ID, best_isa

cdef extern from "row_kernels.h":
    enum: MOST_AHEAD
    int fold_rows_f32(int isa, float* sums, long dim, const uint32_t* slots, const float** rows, const float* scales,
                      long n, long ahead) nogil
    int fold_rows_f64(int isa, double* sums, long dim, const uint32_t* slots, const double** rows, long n,
                      long ahead) nogil
    int nonfinite_rows_f32(int isa, const char* rows, long stride, const index_t* row_index, const float* scales, long n,
                           long dim) nogil
    int nonfinite_rows_f64(int isa, const char* rows, long stride, const index_t* row_index, long n, long dim) nogil

cdef extern from "progress.h" nogil:
    const int64_t ALL_DONE
    bint is_set(const int* flag)
    void set_flag(int* flag)
    void publish(int64_t* progress, int64_t value)
    int64_t wait_for(int64_t* progress, int64_t wanted, const int* stop)

cdef enum:
    EVERY = -1           # owner: rows of every slot
    # Neighbouring sums have one owner: a page of them, beyond which no prefetcher looks. The first ids are often the most
    # frequent ones; the sums of the first page are assigned by pairs of cache lines.
    PAGE = 4096
    PAIR = 128


cdef struct Buffered:    # rows about to be folded, and those after them, whose memory is asked for
    row_t[CHUNK + MOST_AHEAD] rows
    float[CHUNK + MOST_AHEAD] scales
    uint32_t[CHUNK + MOST_AHEAD] slots
    Py_ssize_t num_rows
    bint scaled


cdef int part_fold(Part* part, const Frame* frame, const int* stop) noexcept nogil:
    """Fold the rows whose slots ``part_find`` finds, possibly at the same time on another thread.

    stop : set where another task has found a bad row
    Returns 1 at a value that is not finite, where the frame is strict; what has been added by then is there.
    """
    cdef int64_t next_row = 0
    cdef int bad = fold_from(part, frame, &next_row, EVERY, stop)
    publish(&part.split, next_row)
    if next_row < ALL_DONE and not bad:
        bad = fold_from(part, frame, &next_row, 0, stop)
    return bad


cdef int part_help(Part* part, const Frame* frame, const int* stop) noexcept nogil:
    """Share the rows that ``part_fold``, which another thread has begun, has not folded yet. Returns as it does."""
    cdef int64_t next_row
    set_flag(&part.helped)
    next_row = wait_for(&part.split, 0, stop)
    if next_row < 0 or next_row >= ALL_DONE:
        return 0
    return fold_from(part, frame, &next_row, 1, stop)


cdef int fold_from(Part* part, const Frame* frame, int64_t* next_row, int owner, const int* stop) noexcept nogil:
    """Fold the rows of an owner from a row on. at : IN, OUT the next row; ALL_DONE at the end, not where help came."""
    cdef Buffered b
    cdef int64_t progress, upto
    cdef Py_ssize_t s, n, num_ahead, source = 0, first = 0
    cdef bint last = False, nonfinite
    b.num_rows, b.scaled = 0, False
    for s in range(frame.num_sources):
        b.scaled |= frame.sources[s].scales != NULL
    while not last:
        progress = wait_for(&part.progress, next_row[0] + CHUNK, stop)
        if progress < 0:
            return 0
        upto = min(progress & (ALL_DONE - 1), next_row[0] + CHUNK)
        last = progress == upto + ALL_DONE
        take(&b, part, frame, owner, &source, &first, next_row[0], upto)
        next_row[0] = upto
        num_ahead = 0 if last else min(<Py_ssize_t>MOST_AHEAD, b.num_rows)
        n = b.num_rows - num_ahead
        if frame.wide:
            nonfinite = fold_rows_f64(frame.isa, <double*>part.sums, frame.dim, b.slots, <const double**>b.rows, n,
                                      num_ahead)
        else:
            nonfinite = fold_rows_f32(frame.isa, <float*>part.sums, frame.dim, b.slots, <const float**>b.rows,
                                      b.scales if b.scaled else NULL, n, num_ahead)
        if nonfinite and frame.strict:
            return 1
        memmove(b.rows, b.rows + n, num_ahead * sizeof(row_t))
        memmove(b.slots, b.slots + n, num_ahead * sizeof(uint32_t))
        if b.scaled:
            memmove(b.scales, b.scales + n, num_ahead * sizeof(float))
        b.num_rows = num_ahead
        if owner == EVERY and not last and is_set(&part.helped):
            next_row[0] -= num_ahead  # these are shared out
            return 0
    next_row[0] = ALL_DONE
    return 0


cdef void take(Buffered* b, const Part* part, const Frame* frame, int owner, Py_ssize_t* source, Py_ssize_t* first,
               Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Append the rows of an owner from ``begin`` to ``end`` of those of the part.

    source, first : of the last row, and the number in the frame of that source's first one; they are moved on
    """
    cdef Py_ssize_t k, row, n = b.num_rows
    cdef const Source* s = &frame.sources[source[0]]
    cdef uint32_t slot
    cdef int coarse = 0, fine = 0
    while (frame.dim << coarse) * (8 if frame.wide else 4) < PAGE:
        coarse += 1
        fine += (frame.dim << coarse) * (8 if frame.wide else 4) <= PAIR
    for k in range(begin, end):
        row = (k if part.picked == NULL else <Py_ssize_t>part.picked[k]) - first[0]
        while row >= s.num_rows:
            row -= s.num_rows
            first[0] += s.num_rows
            source[0] += 1
            s = &frame.sources[source[0]]
        slot = part.slots[k] & ~<uint32_t>NEW_ID
        b.rows[n] = s.rows + (row if s.row_index == NULL else s.row_index[row]) * s.stride
        b.slots[n] = part.slots[k]
        if b.scaled:
            b.scales[n] = 1 if s.scales == NULL else s.scales[row]
        # No branch: whose rows come next cannot be predicted.
        n += owner == EVERY or (slot >> (coarse if slot >> coarse else fine) & 1) == <uint32_t>owner
    b.num_rows = n


cdef int part_check(const Frame* frame, const Vocabulary* vocabulary, Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil:
    """Whether an id lies outside the vocabulary or a value is not finite, in share ``number`` of the rows."""
    cdef Py_ssize_t s, first, n
    cdef const Source* source
    cdef const char* rows
    cdef const index_t* row_index
    cdef bint nonfinite
    for s in range(frame.num_sources):
        source = &frame.sources[s]
        first = source.num_rows * number // num_parts
        n = source.num_rows * (number + 1) // num_parts - first
        if outside(source.ids + first, n, vocabulary.size):
            return 1
        rows, row_index = source.rows, NULL
        if source.row_index != NULL:
            row_index = source.row_index + first
        else:
            rows += first * source.stride
        if frame.wide:
            nonfinite = nonfinite_rows_f64(frame.isa, rows, source.stride, row_index, n, frame.dim)
        else:
            nonfinite = nonfinite_rows_f32(frame.isa, rows, source.stride, row_index,
                                           source.scales + first if source.scales != NULL else NULL, n, frame.dim)
        if nonfinite:
            return 1
    return 0


# ---- rows that an activation sums


def combine(const float[:, ::1] rows not None, const index_t[::1] which, const index_t[::1] samples not None,
            const float[::1] gains, float[:, ::1] out not None):
    """Add rows to the sums of their samples: out[samples[k]] += gains[k] * rows[which[k]], in order.

    rows : float32, shape (r, dim); which : int64, shape (n,), None: all rows in order
    samples : int64, shape (n,); gains : float32, shape (n,), None: all 1
    out : float32, shape (num_samples, dim)
    A product is rounded to float32 before it is added: no array of products is created. Twin: ``reference.combine``.
    """
    cdef Py_ssize_t n = samples.shape[0], start = 0, num_chunk, k
    cdef Py_ssize_t num_rows = rows.shape[0], num_samples = out.shape[0], dim = out.shape[1]
    cdef row_t[CHUNK] chunk
    cdef uint32_t[CHUNK] slots
    cdef int isa = best_isa()
    cdef const float* scales = NULL
    cdef index_t row
    cdef bint outside = num_samples > MOST_SLOTS
    if rows.shape[1] != dim or (num_rows if which is None else which.shape[0]) != n:
        raise ValueError("rows, which, samples and out do not fit each other")
    if gains is not None and gains.shape[0] != n:
        raise ValueError("gains and samples do not fit each other")
    if not n or not dim:
        return
    with nogil:
        for k in range(n):
            outside |= not 0 <= samples[k] < num_samples
        if which is not None:
            for k in range(n):
                outside |= not 0 <= which[k] < num_rows
        while start < n and not outside:
            num_chunk = min(<Py_ssize_t>CHUNK, n - start)
            for k in range(num_chunk):
                row = start + k if which is None else which[start + k]
                chunk[k] = <row_t>(&rows[0, 0] + row * dim)
                slots[k] = <uint32_t>samples[start + k]
            if gains is not None:
                scales = &gains[start]
            fold_rows_f32(isa, &out[0, 0], dim, slots, <const float**>chunk, scales, num_chunk, 0)
            start += num_chunk
    if outside:
        raise ValueError("a sample or a row lies outside its array")
