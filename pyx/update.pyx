"""The optimizer's step on a CPU, as handlers that XLA calls: tables are updated in place, where they lie.

A program on the devices gets the table and one small constant array per device that names a ``Step``:
host memory that says what to do with which host arrays. So nothing is staged, padded or copied, and one
program serves every number of rows. The equations stand in update_rules.h, the threads in crew.h; here
are the order of work, where a row lives (the arithmetic of partition.pyx), and the two classes that own
what a handler reads. A Step and its arrays must stay as they are until the program that was given it is
done. Nothing here calls Python from a handler.
"""

import numpy as np

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ._types cimport grad_t, id_t


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


cdef extern from "update_rules.h" nogil:
    enum: NUM_RULES, MAX_SUMMED_DIM
    ctypedef struct Rule:
        float lr, gradient_min, gradient_max, weight_min, weight_max, weight_decay
        float momentum, exponent, beta, beta1, beta2, rho, epsilon, lr_power, l1, l2
        float max_var_update, max_accumulator, tau, max_delta, outlier_threshold
        bint decay_times_learning_rate, use_nesterov, use_sum_inside_sqrt, update_accumulator_first
        bint multiply_linear_by_lr
    ctypedef struct Batch:
        float** rows
        const float** grads
        int64_t num_rows, dim, ahead, row_bytes
    ctypedef void (*UpdateRows)(const Rule*, const Batch*) noexcept nogil
    ctypedef struct RuleEntry:
        const char* name
        int num_slots
        UpdateRows run
    const RuleEntry* rules_of_target(int n, const char** name)


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


# Rows of one claim: their addresses lie on the stack of the thread that took it. Enough that the rows at its
# beginning, whose memory nobody asked for ahead, do not count; few enough that two threads share 4,000 rows.
cdef enum:
    CHUNK = 1024
    # Slots of a rule at most, and parts of a table.
    MAX_PARTS = 4
# Bytes of rows asked for ahead: half of a first-level cache.
cdef int64_t BYTES_AHEAD = 16384


cdef enum Op:
    UPDATE
    WRITE
    READ


cdef struct Table:              # what is fixed for a table, the same on all its devices
    Rule rule
    UpdateRows run
    bint non_lazy
    bint mod
    int64_t vocabulary_size, num_shards, rows_per_shard, shards_per_device
    int64_t quotient, longer    # DIV: rows of a short shard, ids in the shards that are one longer
    double per_shards, per_quotient, per_longer
    int64_t num_parts, dim, threads
    float starts[MAX_PARTS]
    const float* zeros


cdef struct Segment:            # rows of one host array; ids is NULL for the ids from first on
    const id_t* ids
    id_t first
    grad_t* values
    int64_t num_rows
    int64_t first_claim


cdef struct Order:              # one step: the same for all devices
    const Table* table
    Op op
    int64_t part
    float lr
    Segment* segments
    int64_t num_segments
    int64_t num_claims


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
    else:
        copy(p, rows, values, n)


cdef inline int64_t chunks(int64_t num_rows) noexcept nogil:
    return (num_rows + CHUNK - 1) // CHUNK


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
    """(table, step) → (table in place, fence int32[1]): the step's rows of this device."""
    cdef Pass p
    cdef const char* wrong
    if ffi_answer_metadata(frame) or frame.stage != FFI_STAGE_EXECUTE:
        return NULL
    if frame.args.size != 2 or frame.rets.size != 2:
        return ffi_error(frame, FFI_INTERNAL, "penstock: expected a table and a step")
    wrong = begin_pass(&p, frame, frame.args.buffers[0], frame.args.buffers[1])
    if wrong == NULL and frame.rets.buffers[0].data != frame.args.buffers[0].data:
        wrong = "penstock: the table was not given to be updated in place"
    if wrong != NULL:
        return ffi_error(frame, FFI_INTERNAL, wrong)
    (<int32_t*>frame.rets.buffers[1].data)[0] = 0
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


# ---- what the host says


def targets():
    """The instruction sets that the rules are compiled for and this machine has, the best first."""
    cdef const char* name
    cdef int n = 0
    found = []
    while rules_of_target(n, &name) != NULL:
        found.append(name.decode())
        n += 1
    return found


def rules():
    """Name → number of slots of every rule in update_rules.h."""
    cdef const char* name
    cdef const RuleEntry* entries = rules_of_target(0, &name)
    cdef int i
    return {entries[i].name.decode(): entries[i].num_slots for i in range(NUM_RULES)}


cdef class Plan:
    """What is fixed for a table: its rule, where its rows live, on how many threads it is updated.

    rule : one of ``rules``
    numbers : the rule's parameters, switches and limits, by the field names of Rule; one that is missing is 0
    starts : what weights and slots begin with
    num_shards, mod, rows_per_shard, shards_per_device : as in partition.place
    threads : at most so many per device; 0: as many as XLA's pool has
    target : one of ``targets``; "": the best
    """
    cdef Table table
    cdef readonly object zeros

    def __init__(self, str rule, numbers, starts, int64_t dim, int64_t vocabulary_size, int64_t num_shards, bint mod,
                 int64_t rows_per_shard, int64_t shards_per_device, bint non_lazy, int64_t threads, str target=""):
        cdef Table* t = &self.table
        cdef const RuleEntry* entry = entry_of(rule, target)
        cdef grad_t[::1] zeros
        if len(starts) != 1 + entry.num_slots:
            raise ValueError(f"{rule}: expected {1 + entry.num_slots} starts, got {len(starts)}")
        t.run, t.num_parts, t.dim, t.threads, t.non_lazy = entry.run, len(starts), dim, threads, non_lazy
        for part in range(len(starts)):
            t.starts[part] = starts[part]
        self.zeros = np.zeros(max(1, dim), np.float32)
        zeros = self.zeros
        t.zeros = &zeros[0]
        t.vocabulary_size, t.num_shards, t.mod = vocabulary_size, num_shards, mod
        t.rows_per_shard, t.shards_per_device = rows_per_shard, shards_per_device
        t.quotient = vocabulary_size // num_shards
        t.longer = vocabulary_size % num_shards * (t.quotient + 1)
        t.per_shards, t.per_longer = 1.0 / num_shards, 1.0 / (t.quotient + 1)
        t.per_quotient = 1.0 / max(1, t.quotient)
        set_rule(&t.rule, {**dict.fromkeys(NUMBERS, 0.0), **numbers})


NUMBERS = (
    "gradient_min gradient_max weight_min weight_max weight_decay momentum exponent beta beta1 beta2 rho epsilon "
    "lr_power l1 l2 max_var_update max_accumulator tau max_delta outlier_threshold decay_times_learning_rate "
    "use_nesterov use_sum_inside_sqrt update_accumulator_first multiply_linear_by_lr"
).split()


cdef const RuleEntry* entry_of(str rule, str target) except NULL:
    cdef const char* name = NULL
    cdef int i, n = targets().index(target) if target else 0
    cdef const RuleEntry* entries = rules_of_target(n, &name)
    for i in range(NUM_RULES):
        if entries[i].name.decode() == rule:
            return &entries[i]
    raise ValueError(f"no rule '{rule}'")


cdef int set_rule(Rule* r, numbers) except -1:
    r.gradient_min, r.gradient_max = numbers["gradient_min"], numbers["gradient_max"]
    r.weight_min, r.weight_max = numbers["weight_min"], numbers["weight_max"]
    r.weight_decay, r.decay_times_learning_rate = numbers["weight_decay"], numbers["decay_times_learning_rate"]
    r.momentum, r.use_nesterov = numbers["momentum"], numbers["use_nesterov"]
    r.exponent, r.beta, r.rho, r.epsilon = numbers["exponent"], numbers["beta"], numbers["rho"], numbers["epsilon"]
    r.beta1, r.beta2 = numbers["beta1"], numbers["beta2"]
    r.use_sum_inside_sqrt = numbers["use_sum_inside_sqrt"]
    r.lr_power, r.l1, r.l2 = numbers["lr_power"], numbers["l1"], numbers["l2"]
    r.multiply_linear_by_lr = numbers["multiply_linear_by_lr"]
    r.max_var_update, r.max_accumulator = numbers["max_var_update"], numbers["max_accumulator"]
    r.update_accumulator_first = numbers["update_accumulator_first"]
    r.tau, r.max_delta, r.outlier_threshold = numbers["tau"], numbers["max_delta"], numbers["outlier_threshold"]
    return 0


cdef class Step:
    """One thing to do to a table's rows: host memory at ``address`` that a handler reads when its turn comes.

    May be set anew when the program that was given it is done, and not before. Holds the arrays until then.
    """
    cdef Order order
    cdef Py_ssize_t room
    cdef Plan plan
    cdef object held

    def __cinit__(self, Plan plan not None):
        self.plan = plan
        self.order.table = &plan.table
        self.order.segments = NULL
        self._reserve(1)

    def __dealloc__(self):
        PyMem_Free(self.order.segments)

    @property
    def address(self):
        """Where it lies: what the program's operand says."""
        return <size_t>&self.order

    def update(self, segments, float lr):
        """One optimizer application to the rows of ids, distinct over all segments.

        segments : (ids int64 (n,), gradients float32 (n, dim)) each
        """
        self._begin(UPDATE, len(segments))
        self.order.lr = lr
        for ids, grads in segments:
            self._add(ids, grads)
        self.held = segments

    def copy(self, ids, values, int64_t part, bint write):
        """Set one part of the rows of distinct ids to values, or values to that part of the rows of any ids.

        ids : int64 (n,), or the first of consecutive ids
        values : float32 (n, dim); written where write is False
        """
        self._begin(WRITE if write else READ, 1)
        if not 0 <= part < self.plan.table.num_parts:
            raise ValueError(f"expected 0 <= part < {self.plan.table.num_parts}, got {part}")
        self.order.part = part
        self._add(ids, values)
        self.held = ids, values

    def release(self):
        """Let go of the arrays: the program is done."""
        self.held = None
        self.order.num_segments = self.order.num_claims = 0

    cdef int _begin(self, Op op, Py_ssize_t num_segments) except -1:
        self.release()
        self._reserve(num_segments)
        self.order.op = op
        return 0

    cdef int _add(self, ids, values) except -1:
        cdef Segment* segment = &self.order.segments[self.order.num_segments]
        cdef const id_t[::1] keys
        cdef const grad_t[:, ::1] rows = values  # one row after the other
        segment.ids, segment.first, segment.num_rows = NULL, 0, rows.shape[0]
        segment.values = <grad_t*>&rows[0, 0] if rows.shape[0] else NULL
        if rows.shape[1] != self.plan.table.dim:
            raise ValueError(f"expected rows of {self.plan.table.dim} floats, got {rows.shape[1]}")
        if isinstance(ids, int):
            segment.first = ids
        else:
            keys = ids
            if keys.shape[0] != rows.shape[0]:
                raise ValueError(f"expected {keys.shape[0]} rows for as many ids, got {rows.shape[0]}")
            segment.ids = &keys[0] if keys.shape[0] else NULL
        segment.first_claim = self.order.num_claims
        self.order.num_claims += chunks(segment.num_rows)
        self.order.num_segments += 1
        return 0

    cdef int _reserve(self, Py_ssize_t num_segments) except -1:
        if num_segments > self.room:
            PyMem_Free(self.order.segments)
            self.room = 0
            self.order.segments = <Segment*>PyMem_Malloc(num_segments * sizeof(Segment))
            if self.order.segments == NULL:
                raise MemoryError(f"no memory for {num_segments} segments")
            self.room = num_segments
        return 0
