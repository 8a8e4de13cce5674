"""The handlers that XLA calls for a step on a CPU: a table's rows are updated in place, where they lie.

A handler gets the table and one small constant array that names a ``Step`` of update.pyx. The equations stand
in update_rules.h, the threads in crew.h; here are the order of work and where a row lives (the arithmetic of
partition.pyx). Nothing here calls Python.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ._types cimport id_t
from .update cimport CHUNK, READ_ALL, UPDATE, WRITE, Batch, Order, Rule, Segment, Table, chunks


cdef extern from "xla_ffi.h" nogil:
    ctypedef struct FfiError
    ctypedef struct FfiBuffer:
        int dtype
        void* data
        int64_t rank
        int64_t* dims
    ctypedef struct FfiBuffers:
        int64_t size
        FfiBuffer** buffers
    ctypedef struct FfiFrame:
        int stage
        FfiBuffers args
        FfiBuffers rets
    enum: FFI_STAGE_EXECUTE, FFI_INVALID_ARGUMENT, FFI_INTERNAL, FFI_RESOURCE_EXHAUSTED, FFI_F32, FFI_S32
    bint ffi_answer_metadata(FfiFrame* frame)
    FfiError* ffi_error(const FfiFrame* frame, int code, const char* message)


cdef extern from "crew.h" nogil:
    void crew_run(const FfiFrame* frame, int64_t max_threads, int64_t num_claims,
                  void (*work)(void*, int64_t) noexcept nogil, void* context)


cdef extern from *:
    """
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif
    /* Huge pages for the whole ones inside untouched memory: a table's rows are met in no order, and each
       would cost a TLB miss. Where the kernel has no such pages nothing changes. */
    static inline void ask_for_huge_pages(void *memory, size_t num_bytes) {
    #if defined(MADV_HUGEPAGE)
        const uintptr_t huge = (uintptr_t)1 << 21;
        uintptr_t first = ((uintptr_t)memory + huge - 1) & ~(huge - 1);
        uintptr_t last = ((uintptr_t)memory + num_bytes) & ~(huge - 1);
        if (last > first) (void)madvise((void *)first, last - first, MADV_HUGEPAGE);
    #else
        (void)memory, (void)num_bytes;
    #endif
    }
    #define prefetch(address) __builtin_prefetch(address)
    #define set_bit(words, bit) \
        ((void)__atomic_fetch_or((words) + ((bit) >> 6), (uint64_t)1 << ((bit) & 63), __ATOMIC_RELAXED))
    #define set_flag(flag) __atomic_store_n(flag, 1, __ATOMIC_RELAXED)
    """
    void ask_for_huge_pages(void* memory, size_t num_bytes) nogil
    void prefetch(const void* address) nogil
    void set_bit(uint64_t* words, int64_t bit) nogil
    void set_flag(int* flag) nogil


# Bytes of rows asked for ahead: half of a first-level cache.
cdef int64_t BYTES_AHEAD = 16384
cdef enum:
    FLOATS_PER_LINE = 16


cdef struct Pass:               # one step on one device
    const Order* order
    const Table* table
    Rule rule
    float* rows
    int64_t num_rows, row_floats, ahead, first_shard
    uint64_t* touched           # one bit per row, where the rule is not lazy
    int outside                 # an id was no row of the table


# ---- where a row lives


cdef inline int64_t divided(int64_t a, int64_t b, double per_b) noexcept nogil:
    """a // b for 0 <= a < 2**52: off by one at most after the multiplication, and a division costs ten times that."""
    cdef int64_t quotient = <int64_t>(<double>a * per_b)
    cdef int64_t left = a - quotient * b
    if left < 0:
        return quotient - 1
    return quotient + 1 if left >= b else quotient


cdef inline int64_t place(const Pass* p, id_t key) noexcept nogil:
    """The row of an id on this device; -1 where it lives on another one, -2 where it is outside the table."""
    cdef const Table* t = p.table
    cdef int64_t shard, row
    if <uint64_t>key >= <uint64_t>t.vocabulary_size:
        return -2
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
    shard -= p.first_shard
    if <uint64_t>shard >= <uint64_t>t.shards_per_device:
        return -1
    return shard * t.rows_per_shard + row


# ---- the work of one claim


cdef void touch_chunk(void* context, int64_t claim) noexcept nogil:
    """The rows of one chunk of a segment: found, asked for, then updated, written or read in order."""
    cdef Pass* p = <Pass*>context
    cdef const Order* o = p.order
    cdef const Segment* segment = o.segments
    cdef float* rows[CHUNK]
    cdef float* values[CHUNK]
    cdef int64_t i, begin, end, row, n = 0
    while claim >= segment.first_claim + chunks(segment.num_rows):
        segment += 1
    begin = (claim - segment.first_claim) * CHUNK
    end = min(begin + CHUNK, segment.num_rows)
    for i in range(begin, end):
        row = place(p, segment.first + i if segment.ids == NULL else segment.ids[i])
        if row >= 0:
            rows[n] = p.rows + row * p.row_floats
            values[n] = segment.values + i * p.table.dim
            if n < p.ahead:
                prefetch(rows[n])
            n += 1
            if p.touched != NULL:
                set_bit(p.touched, row)
        elif row == -2:
            set_flag(&p.outside)
    if o.op == UPDATE:
        update(p, rows, <const float**>values, n)
    elif o.op == READ_ALL:
        copy_all(p, rows, values, n)
    else:
        copy(p, rows, values, n)


cdef void update(const Pass* p, float** rows, const float** grads, int64_t n) noexcept nogil:
    cdef Batch batch
    batch.rows, batch.grads, batch.num_rows = rows, grads, n
    batch.dim, batch.ahead, batch.row_bytes = p.table.dim, p.ahead, p.row_floats * sizeof(float)
    p.table.run(&p.rule, &batch)


cdef void copy(const Pass* p, float** rows, float** values, int64_t n) noexcept nogil:
    """One part of the rows from or to the host's arrays."""
    cdef int64_t i, dim = p.table.dim, offset = p.order.part * dim
    for i in range(n):
        if i + p.ahead < n:
            prefetch(rows[i + p.ahead] + offset)
        if p.order.op == WRITE:
            memcpy(rows[i] + offset, values[i], dim * sizeof(float))
        else:
            memcpy(values[i], rows[i] + offset, dim * sizeof(float))


cdef void copy_all(const Pass* p, float** rows, float** values, int64_t n) noexcept nogil:
    """Every part of the rows to the host's array, which has the parts one after the other."""
    cdef int64_t i, line, part, dim = p.table.dim
    for i in range(n):
        if i + p.ahead < n:
            # All of a row at once: where rows lie in no order, the processor guesses the next line too late.
            for line in range((p.row_floats + FLOATS_PER_LINE - 1) // FLOATS_PER_LINE):
                prefetch(rows[i + p.ahead] + line * FLOATS_PER_LINE)
        for part in range(p.table.num_parts):
            memcpy(values[i] + part * p.order.plane_floats, rows[i] + part * dim, dim * sizeof(float))


cdef void sweep_chunk(void* context, int64_t claim) noexcept nogil:
    """A gradient of 0 for those of the next CHUNK rows of the device that the step has not touched."""
    cdef Pass* p = <Pass*>context
    cdef float* rows[CHUNK]
    cdef const float* grads[CHUNK]
    cdef int64_t row, n = 0
    for row in range(claim * CHUNK, min((claim + 1) * CHUNK, p.num_rows)):
        if not p.touched[row >> 6] >> (row & 63) & 1:
            rows[n] = p.rows + row * p.row_floats
            grads[n] = p.table.zeros
            n += 1
    update(p, rows, grads, n)


cdef void start_chunk(void* context, int64_t claim) noexcept nogil:
    """Every part of CHUNK rows filled with the value it starts with."""
    cdef Pass* p = <Pass*>context
    cdef int64_t row, part, c
    cdef float* into
    for row in range(claim * CHUNK, min((claim + 1) * CHUNK, p.num_rows)):
        into = p.rows + row * p.row_floats
        for part in range(p.table.num_parts):
            for c in range(p.table.dim):
                into[part * p.table.dim + c] = p.table.starts[part]


# ---- the handlers


cdef const char* begin_pass(Pass* p, const FfiFrame* frame, FfiBuffer* table, FfiBuffer* where) noexcept nogil:
    """The step that ``where`` names, on the rows of ``table``. Returns what is wrong, or NULL."""
    cdef uint32_t* words = <uint32_t*>where.data
    if where.dtype != FFI_S32 or where.rank != 2 or where.dims[0] != 1 or where.dims[1] != 3:
        return "penstock: expected a step as int32[1, 3]"
    p.order = <const Order*><uint64_t>(words[0] | <uint64_t>words[1] << 32)
    p.table = p.order.table
    p.rule = p.table.rule
    p.rule.lr = p.order.lr
    p.rows = <float*>table.data
    p.row_floats = p.table.num_parts * p.table.dim
    p.ahead = max(4, min(32, BYTES_AHEAD // (p.row_floats * <int64_t>sizeof(float) + 1)))
    p.first_shard = <int64_t>words[2] * p.table.shards_per_device
    p.touched = NULL
    p.outside = 0
    if table.dtype != FFI_F32 or table.rank != 3:
        return "penstock: expected a table of float32[rows, parts, dim]"
    p.num_rows = table.dims[0]
    if (p.num_rows != p.table.shards_per_device * p.table.rows_per_shard or table.dims[1] != p.table.num_parts
            or table.dims[2] != p.table.dim):
        return "penstock: a table of another shape than its step's"
    return NULL


cdef FfiError* touch(FfiFrame* frame) noexcept nogil:
    """(table, step) → the table in place: the step's rows of this device."""
    cdef Pass p
    cdef const char* wrong
    if ffi_answer_metadata(frame) or frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    if frame.args.size != 2 or frame.rets.size != 1:
        return ffi_error(frame, FFI_INTERNAL, "penstock: expected a table and a step")
    wrong = begin_pass(&p, frame, frame.args.buffers[0], frame.args.buffers[1])
    if wrong == NULL and frame.rets.buffers[0].data != frame.args.buffers[0].data:
        wrong = "penstock: the table was not given to be updated in place"
    if wrong != NULL:
        return ffi_error(frame, FFI_INTERNAL, wrong)
    if p.order.op == UPDATE and p.table.non_lazy:
        p.touched = <uint64_t*>calloc((p.num_rows + 63) // 64, sizeof(uint64_t))
        if p.touched == NULL:
            return ffi_error(frame, FFI_RESOURCE_EXHAUSTED, "penstock: no memory for one bit per row of a table")
    crew_run(frame, p.table.threads, p.order.num_claims, touch_chunk, &p)
    if p.touched != NULL:
        crew_run(frame, p.table.threads, chunks(p.num_rows), sweep_chunk, &p)
        free(p.touched)
    if p.outside:
        return ffi_error(frame, FFI_INVALID_ARGUMENT, "penstock: an id outside the table; all other rows were updated")
    return NULL


cdef FfiError* create(FfiFrame* frame) noexcept nogil:
    """(step) → the table, every part filled with what it starts with."""
    cdef Pass p
    cdef const char* wrong
    if ffi_answer_metadata(frame) or frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    if frame.args.size != 1 or frame.rets.size != 1:
        return ffi_error(frame, FFI_INTERNAL, "penstock: expected a step and room for a table")
    wrong = begin_pass(&p, frame, frame.rets.buffers[0], frame.args.buffers[0])
    if wrong != NULL:
        return ffi_error(frame, FFI_INTERNAL, wrong)
    ask_for_huge_pages(p.rows, p.num_rows * p.row_floats * sizeof(float))
    crew_run(frame, p.table.threads, chunks(p.num_rows), start_chunk, &p)
    return NULL


def handlers():
    """Name → capsule of every handler, for ``jax.ffi.register_ffi_target``."""
    return {"penstock_touch": PyCapsule_New(<void*>touch, NULL, NULL),
            "penstock_create": PyCapsule_New(<void*>create, NULL, NULL)}
