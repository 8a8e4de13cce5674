# What a step on the rows of tables is, which update.pyx prepares and row_updates.pyx does.
from libc.stdint cimport int64_t, uint64_t

from ._types cimport grad_t, id_t
from .page_counters cimport page_bits_of
from .partition cimport Shards, locate_one, shards_of

cdef extern from "rule.h" nogil:
    ctypedef struct Rule:
        float lr, gradient_min, gradient_max, weight_min, weight_max, weight_decay
        float momentum, exponent, beta, beta1, beta2, rho, epsilon, lr_power, l1, l2
        float max_var_update, max_accumulator, tau, max_delta, outlier_threshold, of_mean, of_root
        bint decay_times_learning_rate, use_nesterov, use_sum_inside_sqrt, update_accumulator_first
        bint multiply_linear_by_lr
    ctypedef struct Batch:
        float** rows
        const float** grads
        int64_t num_rows, num_known, dim, ahead, row_bytes
    ctypedef void (*UpdateRows)(const Rule*, const Batch*) noexcept nogil

cdef enum:
    # Rows whose addresses lie on the stack of the thread that updates them.
    CHUNK = 1024
    # Rows whose memory is asked for early, at most.
    MOST_AHEAD = 32
    # Chunks of one work item of a large segment. The rows at an item's beginning are not asked for early, so items are
    # long; but there are enough to keep all threads busy to the end. Two threads share 4,000 rows.
    MOST_CHUNKS = 8


cdef enum Op:
    UPDATE
    WRITE
    READ


cdef struct Table:              # what is fixed for a table, the same on all its devices
    Rule rule
    UpdateRows run
    const char* name
    bint non_lazy
    bint whole                  # DIV, and one device has all shards: ids are row numbers
    Shards shards
    int64_t vocabulary_size, rows_per_shard, shards_per_device
    int64_t num_parts, num_wide, dim    # of the parts of a row: dim floats each of the first, then one each
    int64_t first_float         # of the array that a device's tables lie in
    int64_t row_floats, num_rows, ahead
    int page_bits               # the logarithm of the rows of a page
    int64_t first_page          # of the counters of a device's tables
    const float* zeros


cdef struct Segment:            # rows of one table and one host array; ids is NULL for the ids from first on
    const Table* table
    const id_t* ids
    id_t first
    grad_t* values
    int64_t row_floats          # of the values
    int64_t num_rows
    int64_t first_item, rows_per_item
    float lr
    int64_t sweep               # of the step's, where the rule is not lazy; else -1


cdef struct Sweep:              # a table whose every row the step changes
    const Table* table
    float lr
    int64_t first_word          # of its bits, one per row of the device: set where a segment has the row
    int64_t first_item


cdef struct StepWork:           # one step: the same for all devices
    Op op
    int64_t first_copied, num_copied    # floats of a row to read or write
    Segment* segments
    int64_t num_segments, num_items
    Sweep* sweeps
    int64_t num_sweeps, num_sweep_items, num_words


cdef struct NotFinite:          # rows that an update has made so since they were last read and reset
    int64_t num_rows
    const Table* table          # of the first: the first table, on the first device there, the first row
    int64_t device, row
    int lock


cdef struct StepContext:        # one step on one device, shared by the threads that do it
    const StepWork* work
    float* floats               # of all tables
    int64_t device
    uint64_t* touched           # a bit per row of the tables whose rule is not lazy
    bint is_sweep               # whether the items are those of the sweeps
    int64_t num_items, next_item
    const Table* bad_id_table   # an id was no row of this one
    uint64_t* counters          # of the batches of all threads (page_counters.h); NULL: none are counted
    int64_t counters_per_thread, next_thread
    NotFinite not_finite
    int64_t num_floats          # of each device
    uint64_t** known            # of each device, a bit per float: set at the first float of rows that are not finite;
                                # NULL: there are none


cdef void do_items(StepContext* p) noexcept nogil


cdef inline int64_t part_begin(const Table* t, int64_t part) noexcept nogil:
    """Where a part begins in a row: the weights are part 0, and the slots follow."""
    return min(part, t.num_wide) * t.dim + max(part - t.num_wide, 0)


cdef inline int64_t chunks(int64_t num_rows) noexcept nogil:
    return (num_rows + CHUNK - 1) // CHUNK


cdef inline int64_t num_pages(const Table* t) noexcept nogil:
    """Pages of rows whose writes are counted together."""
    return ((t.num_rows - 1) >> t.page_bits) + 1


# ---- where a row lives


cdef inline void set_layout(Table* t, int64_t vocabulary_size, int64_t num_shards, bint mod, int64_t rows_per_shard,
                            int64_t shards_per_device) noexcept nogil:
    """Arguments as in partition.destinations."""
    t.vocabulary_size, t.shards = vocabulary_size, shards_of(vocabulary_size, num_shards, mod)
    t.rows_per_shard, t.shards_per_device = rows_per_shard, shards_per_device
    t.whole = not mod and shards_per_device >= num_shards
    t.num_rows = rows_per_shard * shards_per_device
    t.page_bits = page_bits_of(t.num_rows)


cdef inline int64_t row_of(const Table* t, int64_t first_shard, id_t key) noexcept nogil:
    """The row of an id on the device with these shards; -1 where it lives on another one, -2 where outside the table."""
    cdef id_t shard, row
    if <uint64_t>key >= <uint64_t>t.vocabulary_size:
        return -2
    if t.whole:
        return key
    locate_one(key, &t.shards, &shard, &row)
    shard -= first_shard
    if <uint64_t>shard >= <uint64_t>t.shards_per_device:
        return -1
    return shard * t.rows_per_shard + row
