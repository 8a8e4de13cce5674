"""The memory of a directory: entries by shard, the keys and counts of rows, free rows, and candidates.

The number of shards depends on the capacity alone, so that whatever is decided within a shard is independent of batches,
threads and devices. Nothing grows but the candidates.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from penstock.pyx._types cimport id_t

cdef extern from "pages.h":
    void* penstock_allocate(size_t size) noexcept nogil
    void* penstock_allocate_zeroed(size_t size) noexcept nogil
    void penstock_release(void* memory, size_t size) noexcept nogil

MAX_CLOCK = 2**32 - 2


cdef void shards_divide(Shards* of, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil:
    """Set the number of shards and of their slots.

    capacity : of all shards
    sample_bits : keep one shard of 2 ** sample_bits, the first ones, exactly as among all
    rank, count : keep the contiguous run of shards of one of ``count`` owners; if that is none, one shard of one row
    """
    cdef int64_t stop
    of.num_shards, of.bits = 1, 0
    while 2 * of.num_shards <= min(<int64_t>MOST_SHARDS, capacity // ROWS_PER_SHARD):
        of.num_shards *= 2
        of.bits += 1
    # 1.6 slots per row, and one that is always empty.
    of.slots = (-(-capacity // of.num_shards) * 8 + 4) // 5 + 1
    of.first_shard, stop = rank * of.num_shards // count, (rank + 1) * of.num_shards // count
    of.num_shards = (stop - of.first_shard) >> min(sample_bits, of.bits)
    of.kept = (<uint64_t>1 << (of.bits - min(sample_bits, of.bits))) - 1
    of.first_row = first_row_of(of, capacity, of.first_shard)
    of.capacity = first_row_of(of, capacity, of.first_shard + of.num_shards) - of.first_row
    if of.num_shards == 0:
        of.num_shards = of.capacity = 1


cdef inline int64_t first_row_of(const Shards* of, int64_t capacity, int64_t shard) noexcept nogil:
    """The first row of a shard, both counted among all; the first shards have one row more than the others."""
    return shard * (capacity >> of.bits) + min(shard, capacity & ((<int64_t>1 << of.bits) - 1))


cdef size_t shards_bytes(const Shards* of) noexcept nogil:
    """Bytes of entries, keys, free rows and counts; without candidates. The shards may not be allocated yet."""
    cdef size_t of_counts = sizeof(uint32_t) if of.policy.evict == EVICT_LFU else 0
    return (of.num_shards * of.slots * sizeof(KeyEntry)
            + <size_t>of.capacity * (sizeof(id_t) + sizeof(int32_t) + of_counts))


cdef int shards_init(Shards* of, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil:
    """Allocate empty shards; policy and salts are set. Returns -1 if there is no memory: ``shards_free`` must follow."""
    cdef int64_t s, first, rows = capacity
    shards_divide(of, capacity, sample_bits, rank, count)
    capacity = of.capacity
    of.newest, of.mostly_new = -1, True
    of.entries = <KeyEntry*>penstock_allocate(of.num_shards * of.slots * sizeof(KeyEntry))
    of.keys = <id_t*>penstock_allocate(capacity * sizeof(id_t))
    of.free_rows = <int32_t*>penstock_allocate(capacity * sizeof(int32_t))
    of.each = <Shard*>calloc(of.num_shards, sizeof(Shard))
    if of.policy.evict == EVICT_LFU:
        of.counts = <uint32_t*>penstock_allocate_zeroed(capacity * sizeof(uint32_t))
        if of.counts == NULL:
            return -1
    if of.entries == NULL or of.keys == NULL or of.free_rows == NULL or of.each == NULL:
        return -1
    for s in range(of.num_shards):
        first = first_row_of(of, rows, of.first_shard + s)
        of.each[s].first_row = <int32_t>(first - of.first_row)
        of.each[s].num_rows = <int32_t>(min(first_row_of(of, rows, of.first_shard + s + 1) - first, capacity))
        free_all(of, &of.each[s])
        key_clear(of.entries + s * of.slots, of.slots)
    return 0


cdef void free_all(Shards* of, Shard* shard) noexcept nogil:
    """All rows are free, and the first one is used first."""
    cdef int32_t i
    shard.num_free = shard.num_rows
    for i in range(shard.num_rows):
        of.free_rows[shard.first_row + i] = shard.first_row + shard.num_rows - 1 - i


cdef void shards_free(Shards* of) noexcept nogil:
    cdef int64_t s
    if of.entries != NULL:
        penstock_release(of.entries, of.num_shards * of.slots * sizeof(KeyEntry))
    if of.keys != NULL:
        penstock_release(of.keys, of.capacity * sizeof(id_t))
    if of.free_rows != NULL:
        penstock_release(of.free_rows, of.capacity * sizeof(int32_t))
    if of.counts != NULL:
        penstock_release(of.counts, of.capacity * sizeof(uint32_t))
    free(of.touched)
    if of.each != NULL:
        for s in range(of.num_shards):
            free(of.each[s].young.entries)
            free(of.each[s].old.entries)
            free(of.each[s].lately.prints)
            free(of.each[s].before.prints)
        free(of.each)


cdef void age(Shards* of, Shard* shard, int64_t generation) noexcept nogil:
    """Swap the generations of a shard's candidates as often as those of the whole directory were."""
    cdef int64_t swaps = generation - shard.generation
    shard.generation = generation
    if swaps >= 2:
        candidates_clear(&shard.young)
    if swaps >= 1:
        shard.young, shard.old = shard.old, shard.young
        candidates_clear(&shard.young)


cdef KeyEntry* find_candidate(Shards* of, uint64_t mixed) noexcept nogil:
    """The entry of a candidate, in either generation; NULL: none."""
    cdef Shard* shard = &of.each[shard_of(of, mixed)]
    cdef KeyEntry* entry
    age(of, shard, of.generation)
    entry = candidate_of(&shard.young, of.bits, mixed)
    return entry if entry != NULL else candidate_of(&shard.old, of.bits, mixed)


cdef KeyEntry* candidate_of(const Candidates* some, int bits, uint64_t mixed) noexcept nogil:
    cdef KeyEntry* entry
    if some.size == 0:
        return NULL
    entry = key_find(some.entries, some.slots, bits, mixed)
    return entry if entry.value >= 0 else NULL


cdef void candidates_clear(Candidates* some) noexcept nogil:
    if some.size:
        key_clear(some.entries, some.slots)
    some.size = 0


cdef int candidates_reserve(Candidates* some, size_t num_keys, int bits) noexcept nogil:
    """Make room for num_keys in all. Returns -1, and has changed nothing, if there is no memory."""
    cdef Candidates bigger
    cdef size_t at
    if num_keys * 8 <= some.slots * 5:
        return 0
    bigger.slots = max(num_keys * 2 + num_keys // 2, <size_t>16)
    bigger.size = some.size
    bigger.entries = <KeyEntry*>malloc(bigger.slots * sizeof(KeyEntry))
    if bigger.entries == NULL:
        return -1
    key_clear(bigger.entries, bigger.slots)
    for at in range(some.slots):
        if some.entries[at].value >= 0:
            key_find(bigger.entries, bigger.slots, bits, some.entries[at].mixed)[0] = some.entries[at]
    free(some.entries)
    some[0] = bigger
    return 0
