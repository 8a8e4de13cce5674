"""The handlers that XLA calls for a step on a CPU: rows of any number of tables are updated in place, where they lie.

A handler gets the array that a device's tables lie in, and one small constant array that names a ``Step`` of
update.pyx. The equations are in update_equations.h, the threads in parallel_for.h; here are the order of work and where
a row lives (the arithmetic of partition.pyx, or by id). Nothing here calls Python.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove

from ._types cimport id_t
from .update cimport (
    CHUNK, MOST_AHEAD, UPDATE, WRITE, Batch, StepPlan, Rule, Segment, Sweep, Table, chunks, part_begin,
)


cdef extern from "xla_ffi.h" nogil:
    ctypedef struct XLA_FFI_Error
    ctypedef struct XLA_FFI_Buffer:
        int dtype
        void* data
        int64_t rank
        int64_t* dims
    ctypedef struct XLA_FFI_Args:
        int64_t size
        void** args
    ctypedef struct XLA_FFI_Rets:
        int64_t size
        void** rets
    ctypedef struct XLA_FFI_CallFrame:
        int stage
        XLA_FFI_Args args
        XLA_FFI_Rets rets
    enum: XLA_FFI_DataType_F32, XLA_FFI_DataType_S32, XLA_FFI_ExecutionStage_EXECUTE
    ctypedef enum XLA_FFI_Error_Code:
        XLA_FFI_Error_Code_INVALID_ARGUMENT
        XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
        XLA_FFI_Error_Code_INTERNAL
    bint ffi_answer_metadata(XLA_FFI_CallFrame* frame)
    XLA_FFI_Error* ffi_error(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message)


cdef extern from "parallel_for.h" nogil:
    void parallel_for(const XLA_FFI_CallFrame* frame, int64_t max_threads, int64_t num_items,
                  void (*work)(void*, int64_t) noexcept nogil, void* context)


cdef extern from "pages.h" nogil:
    void penstock_ask_for_huge_pages(void* memory, size_t size)


cdef extern from *:
    """
    #define prefetch(address) __builtin_prefetch(address)
    #define set_bit(words, bit) \
        ((void)__atomic_fetch_or((words) + ((bit) >> 6), (uint64_t)1 << ((bit) & 63), __ATOMIC_RELAXED))
    #define note(place, table) __atomic_store_n(place, table, __ATOMIC_RELAXED)
    """
    void prefetch(const void* address) nogil
    void set_bit(uint64_t* words, int64_t bit) nogil
    void note(const Table** place, const Table* table) nogil


cdef enum:
    MESSAGE_BYTES = 400             # bytes of an error

cdef struct StepContext:               # one step on one device
    const StepPlan* plan
    float* floats               # of all tables
    int64_t device
    uint64_t* touched           # a bit per row of the tables whose rule is not lazy
    const Table* bad_id_table        # an id was no row of this one


# ---- where a row lives


cdef inline int64_t divided(int64_t a, int64_t b, double per_b) noexcept nogil:
    """a // b for 0 <= a < 2**52: off by one at most after the multiplication, and a division costs ten times that."""
    cdef int64_t quotient = <int64_t>(<double>a * per_b)
    cdef int64_t left = a - quotient * b
    if left < 0:
        return quotient - 1
    return quotient + 1 if left >= b else quotient


cdef inline int64_t place(const Table* t, int64_t first_shard, id_t key) noexcept nogil:
    """The row of an id on the device with these shards; -1 where it lives on another one, -2 where outside the table."""
    cdef int64_t shard, row
    if <uint64_t>key >= <uint64_t>t.vocabulary_size:
        return -2
    if t.whole:
        return key
    if t.mod:
        row = divided(key, t.num_shards, t.per_shards)
        shard = key - row * t.num_shards
    elif key < t.longer:
        shard = divided(key, t.quotient + 1, t.per_longer)
        row = key - shard * (t.quotient + 1)
    else:
        shard = divided(key - t.longer, t.quotient, t.per_quotient)
        row = key - t.longer - shard * t.quotient
        shard += t.vocabulary_size - t.quotient * t.num_shards
    shard -= first_shard
    if <uint64_t>shard >= <uint64_t>t.shards_per_device:
        return -1
    return shard * t.rows_per_shard + row


# ---- one work item


cdef inline const Segment* segment_of(const StepPlan* o, int64_t item) noexcept nogil:
    """The last segment whose first item is not behind this one: those without rows have none of their own."""
    cdef int64_t low = 0, high = o.num_segments, middle
    while high - low > 1:
        middle = (low + high) // 2
        if o.segments[middle].first_item <= item:
            low = middle
        else:
            high = middle
    return &o.segments[low]


cdef void touch_item(void* context, int64_t item) noexcept nogil:
    """The rows of one item of a segment, chunk by chunk: found, then updated, written or read in order."""
    cdef StepContext* p = <StepContext*>context
    cdef const StepPlan* o = p.plan
    cdef const Segment* segment = segment_of(o, item)
    cdef const Table* t = segment.table
    cdef float* first_row = p.floats + t.first_float
    cdef int64_t first_shard = p.device * t.shards_per_device
    cdef uint64_t* touched = NULL
    cdef float* rows[CHUNK + MOST_AHEAD]
    cdef float* values[CHUNK + MOST_AHEAD]
    cdef int64_t i, row, upto, done, n = 0, begin = (item - segment.first_item) * segment.rows_per_item
    cdef int64_t end = min(begin + segment.rows_per_item, segment.num_rows)
    if p.touched != NULL and segment.sweep >= 0:
        touched = p.touched + o.sweeps[segment.sweep].first_word
    while begin < end:
        upto = min(begin + CHUNK, end)
        for i in range(begin, upto):
            row = place(t, first_shard, segment.first + i if segment.ids == NULL else segment.ids[i])
            if row >= 0:
                rows[n] = first_row + row * t.row_floats
                values[n] = segment.values + i * segment.row_floats
                if n < t.ahead:
                    prefetch(rows[n])
                n += 1
                if touched != NULL:
                    set_bit(touched, row)
            elif row == -2:
                note(&p.bad_id_table, t)
        begin, done = upto, n if upto == end else max(<int64_t>0, n - t.ahead)
        if o.op == UPDATE:
            update(t, segment.lr, rows, <const float**>values, done, n)
        else:
            copy(t, o, rows, values, done, n)
        n -= done
        memmove(rows, rows + done, n * sizeof(rows[0]))
        memmove(values, values + done, n * sizeof(values[0]))


cdef void update(const Table* t, float lr, float** rows, const float** grads, int64_t n, int64_t known) noexcept nogil:
    cdef Batch batch
    cdef Rule rule = t.rule
    rule.lr = lr
    batch.rows, batch.grads, batch.num_rows, batch.num_known = rows, grads, n, known
    batch.dim, batch.ahead, batch.row_bytes = t.dim, t.ahead, t.row_floats * sizeof(float)
    t.run(&rule, &batch)


cdef void copy(const Table* t, const StepPlan* o, float** rows, float** values, int64_t n, int64_t known) noexcept nogil:
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


cdef void sweep_chunk(void* context, int64_t item) noexcept nogil:
    """A gradient of 0 for those of the next CHUNK rows of a table that the step has not touched."""
    cdef StepContext* p = <StepContext*>context
    cdef const Sweep* sweep = p.plan.sweeps
    cdef const Table* t
    cdef const uint64_t* touched
    cdef float* rows[CHUNK]
    cdef const float* grads[CHUNK]
    cdef int64_t row, first, n = 0
    while item >= sweep.first_item + chunks(sweep.table.num_rows):
        sweep += 1
    t, touched, first = sweep.table, p.touched + sweep.first_word, (item - sweep.first_item) * CHUNK
    for row in range(first, min(first + CHUNK, t.num_rows)):
        if not touched[row >> 6] >> (row & 63) & 1:
            rows[n] = p.floats + t.first_float + row * t.row_floats
            grads[n] = t.zeros
            n += 1
    update(t, sweep.lr, rows, grads, n, n)


cdef void start_item(void* context, int64_t item) noexcept nogil:
    """Every part of the next rows of a table filled with the value it starts with."""
    cdef StepContext* p = <StepContext*>context
    cdef const Segment* segment = segment_of(p.plan, item)
    cdef const Table* t = segment.table
    cdef int64_t row, part, c, first = (item - segment.first_item) * segment.rows_per_item
    cdef float* into
    for row in range(first, min(first + segment.rows_per_item, t.num_rows)):
        into = p.floats + t.first_float + row * t.row_floats
        for part in range(t.num_parts):
            for c in range(part_begin(t, part), part_begin(t, part + 1)):
                into[c] = t.starts[part]


# ---- the handlers


cdef const char* begin_step(StepContext* p, XLA_FFI_Buffer* floats, XLA_FFI_Buffer* operand) noexcept nogil:
    """The step that ``operand`` names, on the tables in ``floats``. Returns what is wrong, or NULL."""
    cdef uint32_t* words = <uint32_t*>operand.data
    cdef int64_t axis, num_floats = 1
    if operand.dtype != XLA_FFI_DataType_S32 or operand.rank != 2 or operand.dims[0] != 1 or operand.dims[1] != 3:
        return "penstock: expected a step as int32[1, 3]"
    p.plan = <const StepPlan*><uint64_t>(words[0] | <uint64_t>words[1] << 32)
    p.device = words[2]
    p.floats = <float*>floats.data
    p.touched, p.bad_id_table = NULL, NULL
    if floats.dtype != XLA_FFI_DataType_F32:
        return "penstock: expected tables of float32"
    for axis in range(floats.rank):
        num_floats *= floats.dims[axis]
    if num_floats != p.plan.num_floats:
        return "penstock: tables of another size than their step's"
    return NULL


cdef XLA_FFI_Error* touch(XLA_FFI_CallFrame* frame) noexcept nogil:
    """(tables, step) → the tables in place: the step's rows of this device."""
    cdef StepContext p
    cdef XLA_FFI_Buffer* tables
    cdef XLA_FFI_Buffer* result
    cdef const char* wrong
    cdef char[MESSAGE_BYTES] message
    if ffi_answer_metadata(frame) or frame.stage != XLA_FFI_ExecutionStage_EXECUTE:
        return NULL
    if frame.args.size != 2 or frame.rets.size != 1:
        return ffi_error(frame, XLA_FFI_Error_Code_INTERNAL, "penstock: expected tables and a step")
    tables, result = <XLA_FFI_Buffer*>frame.args.args[0], <XLA_FFI_Buffer*>frame.rets.rets[0]
    wrong = begin_step(&p, tables, <XLA_FFI_Buffer*>frame.args.args[1])
    if wrong == NULL and result.data != tables.data:
        wrong = "penstock: the tables were not given to be updated in place"
    if wrong != NULL:
        return ffi_error(frame, XLA_FFI_Error_Code_INTERNAL, wrong)
    if p.plan.num_words:
        p.touched = <uint64_t*>calloc(p.plan.num_words, sizeof(uint64_t))
        if p.touched == NULL:
            return ffi_error(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                             "penstock: no memory for one bit per row of a table")
    parallel_for(frame, p.plan.threads, p.plan.num_items, touch_item, &p)
    if p.touched != NULL:
        parallel_for(frame, p.plan.threads, p.plan.num_sweep_items, sweep_chunk, &p)
        free(p.touched)
    if p.bad_id_table != NULL:
        snprintf(message, MESSAGE_BYTES, "penstock: an id outside the table '%s'; all other rows were updated",
                 p.bad_id_table.name)
        return ffi_error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, message)
    return NULL


cdef XLA_FFI_Error* create(XLA_FFI_CallFrame* frame) noexcept nogil:
    """(step) → the tables, every part filled with what it starts with."""
    cdef StepContext p
    cdef const char* wrong
    if ffi_answer_metadata(frame) or frame.stage != XLA_FFI_ExecutionStage_EXECUTE:
        return NULL
    if frame.args.size != 1 or frame.rets.size != 1:
        return ffi_error(frame, XLA_FFI_Error_Code_INTERNAL, "penstock: expected a step and room for tables")
    wrong = begin_step(&p, <XLA_FFI_Buffer*>frame.rets.rets[0], <XLA_FFI_Buffer*>frame.args.args[0])
    if wrong != NULL:
        return ffi_error(frame, XLA_FFI_Error_Code_INTERNAL, wrong)
    penstock_ask_for_huge_pages(p.floats, p.plan.num_floats * sizeof(float))
    parallel_for(frame, p.plan.threads, p.plan.num_items, start_item, &p)
    return NULL


def handlers():
    """Name → capsule of every handler, for ``jax.ffi.register_ffi_target``."""
    return {"penstock_touch": PyCapsule_New(<void*>touch, NULL, NULL),
            "penstock_create": PyCapsule_New(<void*>create, NULL, NULL)}
