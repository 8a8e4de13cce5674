"""A step on the rows of tables in the host's memory: updated, written or read in place, where they lie.

``update.Step`` says what to do; here are the order of work and where a row lives (the arithmetic of partition.pyx, or
by id). The equations are in update_equations.h. Nothing here calls Python.
"""

from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy, memmove

from .page_counters cimport ROWS_MARKED, begin_batch, end_batch
from .prefetch cimport prefetch
from .progress cimport lock, take_number, unlock

cdef extern from "<fenv.h>" nogil:
    ctypedef struct fenv_t:
        pass
    const fenv_t* FE_DFL_ENV
    int fegetenv(fenv_t* environment)
    int fesetenv(const fenv_t* environment)
    int FE_INVALID, FE_DIVBYZERO, FE_OVERFLOW
    int fetestexcept(int exceptions)
    int feclearexcept(int exceptions)


cdef extern from *:
    """
    #define set_bit(words, bit) \
        ((void)__atomic_fetch_or((words) + ((bit) >> 6), (uint64_t)1 << ((bit) & 63), __ATOMIC_RELAXED))
    #define note(variable, table) __atomic_store_n(variable, table, __ATOMIC_RELAXED)
    """
    void set_bit(uint64_t* words, int64_t bit) nogil
    void note(const Table** variable, const Table* table) nogil


# ---- one work item


cdef inline const Segment* segment_of(const StepWork* o, int64_t item) noexcept nogil:
    """The last segment whose first item is not behind this one: those without rows have none of their own."""
    cdef int64_t low = 0, high = o.num_segments, middle
    while high - low > 1:
        middle = (low + high) // 2
        if o.segments[middle].first_item <= item:
            low = middle
        else:
            high = middle
    return &o.segments[low]


cdef void touch_item(StepContext* p, int64_t item, uint64_t* counters) noexcept nogil:
    """The rows of one item of a segment, chunk by chunk: found, then updated, written or read in order."""
    cdef const StepWork* o = p.work
    cdef const Segment* segment = segment_of(o, item)
    cdef const Table* t = segment.table
    cdef float* first_row = p.floats + t.first_float
    cdef int64_t first_shard = p.device * t.shards_per_device
    cdef uint64_t* touched = NULL
    cdef float* rows[CHUNK + MOST_AHEAD]
    cdef float* values[CHUNK + MOST_AHEAD]
    cdef int64_t numbers[CHUNK + MOST_AHEAD]
    cdef int64_t i, row, upto, done, n = 0, begin = (item - segment.first_item) * segment.rows_per_item
    cdef int64_t end = min(begin + segment.rows_per_item, segment.num_rows)
    if p.touched != NULL and segment.sweep >= 0:
        touched = p.touched + o.sweeps[segment.sweep].first_word
    while begin < end:
        upto = min(begin + CHUNK, end)
        for i in range(begin, upto):
            row = row_of(t, first_shard, segment.first + i if segment.ids == NULL else segment.ids[i])
            if row >= 0:
                rows[n] = first_row + row * t.row_floats
                values[n] = segment.values + i * segment.row_floats
                numbers[n] = row
                if n < t.ahead:
                    prefetch(rows[n])
                n += 1
                if touched != NULL:
                    set_bit(touched, row)
            elif row == -2:
                note(&p.bad_id_table, t)
        begin, done = upto, n if upto == end else max(<int64_t>0, n - t.ahead)
        if o.op == READ:
            copy(t, o, rows, values, done, n)
        else:
            change(p, t, segment.lr, counters, numbers, rows, values, done, n)
        n -= done
        memmove(rows, rows + done, n * sizeof(rows[0]))
        memmove(values, values + done, n * sizeof(values[0]))
        memmove(numbers, numbers + done, n * sizeof(numbers[0]))


cdef void change(StepContext* p, const Table* t, float lr, uint64_t* counters, const int64_t* numbers, float** rows,
                 float** values, int64_t n, int64_t known) noexcept nogil:
    """Update or write rows, in batches that readers can see. counters : of this thread; NULL: none; numbers : of the rows"""
    cdef int64_t first = 0, count = n
    while first < n:
        if counters != NULL:
            count = min(n - first, <int64_t>ROWS_MARKED)
            begin_batch(counters, t.first_page, t.page_bits, numbers + first, count)
        if p.work.op == WRITE:
            copy(t, p.work, rows + first, values + first, count, known - first)
            if p.known[p.device] != NULL:
                forget_not_finite(p, rows + first, count)
        else:
            update(t, lr, rows + first, <const float**>values + first, count, known - first)
            # A finite value becomes infinite or NaN by these alone, which the processor notes at no cost.
            if fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW):
                feclearexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW)
                count_not_finite(p, t, numbers + first, rows + first, count)
        if counters != NULL:
            end_batch(counters)
        first += count


cdef void update(const Table* t, float lr, float** rows, const float** grads, int64_t n, int64_t known) noexcept nogil:
    cdef Batch batch
    cdef Rule rule = t.rule
    rule.lr = lr
    batch.rows, batch.grads, batch.num_rows, batch.num_known = rows, grads, n, known
    batch.dim, batch.ahead, batch.row_bytes = t.dim, t.ahead, t.row_floats * sizeof(float)
    t.run(&rule, &batch)


cdef void count_not_finite(StepContext* p, const Table* t, const int64_t* numbers, float** rows, int64_t n) noexcept nogil:
    """Look for rows that are not finite, and count those that were finite before."""
    cdef NotFinite* total = &p.not_finite
    cdef int64_t i, c, first_float
    cdef bint finite
    lock(&total.lock)
    for i in range(n):
        finite = True
        for c in range(t.row_floats):
            finite &= isfinite(rows[i][c])
        if finite:
            continue
        first_float = rows[i] - p.floats
        if p.known[p.device] == NULL:
            p.known[p.device] = <uint64_t*>calloc((p.num_floats + 63) // 64, sizeof(uint64_t))
        if p.known[p.device] != NULL:  # else there is no memory, and the row counts each time
            if p.known[p.device][first_float >> 6] >> (first_float & 63) & 1:
                continue
            p.known[p.device][first_float >> 6] |= <uint64_t>1 << (first_float & 63)
        if not total.num_rows or t.first_float < total.table.first_float or (
                t == total.table and (p.device < total.device or (p.device == total.device and numbers[i] < total.row))):
            total.table, total.device, total.row = t, p.device, numbers[i]
        total.num_rows += 1
    unlock(&total.lock)


cdef void forget_not_finite(StepContext* p, float** rows, int64_t n) noexcept nogil:
    """Rows have been written: whether they are finite is not known."""
    cdef int64_t i, first_float
    lock(&p.not_finite.lock)
    for i in range(n):
        first_float = rows[i] - p.floats
        p.known[p.device][first_float >> 6] &= ~(<uint64_t>1 << (first_float & 63))
    unlock(&p.not_finite.lock)


cdef void copy(const Table* t, const StepWork* o, float** rows, float** values, int64_t n, int64_t known) noexcept nogil:
    """Some floats of the rows from or to the host's arrays."""
    cdef int64_t i, offset, first = o.first_copied
    for i in range(n):
        if i + t.ahead < known:
            # All of them at once: where rows lie in no order, the processor guesses the next line too late.
            for offset in range(0, o.num_copied, 16):  # the floats of a cache line
                prefetch(rows[i + t.ahead] + first + offset)
        if o.op == WRITE:
            memcpy(rows[i] + first, values[i], o.num_copied * sizeof(float))
        else:
            memcpy(values[i], rows[i] + first, o.num_copied * sizeof(float))


cdef void sweep_chunk(StepContext* p, int64_t item, uint64_t* counters) noexcept nogil:
    """A gradient of 0 for those of the next CHUNK rows of a table that the step has not touched."""
    cdef const Sweep* sweep = p.work.sweeps
    cdef const Table* t
    cdef const uint64_t* touched
    cdef float* rows[CHUNK]
    cdef const float* grads[CHUNK]
    cdef int64_t numbers[CHUNK]
    cdef int64_t row, first, n = 0
    while item >= sweep.first_item + chunks(sweep.table.num_rows):
        sweep += 1
    t, touched, first = sweep.table, p.touched + sweep.first_word, (item - sweep.first_item) * CHUNK
    for row in range(first, min(first + CHUNK, t.num_rows)):
        if not touched[row >> 6] >> (row & 63) & 1:
            rows[n] = p.floats + t.first_float + row * t.row_floats
            grads[n] = t.zeros
            numbers[n] = row
            n += 1
    change(p, t, sweep.lr, counters, numbers, rows, <float**>grads, n, n)


# ---- a step


cdef void do_items(StepContext* p) noexcept nogil:
    """Do items of a step, as other threads may at the same time, until all are taken.

    In the default floating-point environment: other libraries may have set the thread to flush subnormal numbers to zero.
    """
    cdef fenv_t before
    cdef int64_t item
    cdef uint64_t* counters = NULL
    if p.counters != NULL:
        counters = p.counters + take_number(&p.next_thread) * p.counters_per_thread
    fegetenv(&before)
    fesetenv(FE_DFL_ENV)
    item = take_number(&p.next_item)
    while item < p.num_items:
        if p.is_sweep:
            sweep_chunk(p, item, counters)
        else:
            touch_item(p, item, counters)
        item = take_number(&p.next_item)
    fesetenv(&before)
