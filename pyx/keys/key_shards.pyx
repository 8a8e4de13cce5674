"""The memory of a directory: entries by shard, the keys and counts of rows, free rows, and candidates.

The number of shards depends on the capacity alone, so that whatever is decided within a shard is independent of batches,
threads and devices. Nothing grows but the candidates.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from penstock.pyx._types cimport id_t
from penstock.pyx.buffer_pool cimport penstock_allocate, penstock_allocate_zeroed, penstock_release

MAX_CLOCK = 2**32 - 2


cdef void shards_divide(Shards* shards, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil:
    """Set the number of shards and of their slots.

    capacity : of all shards
    sample_bits : keep one shard of 2 ** sample_bits, the first ones, exactly as among all
    rank, count : keep the contiguous run of shards of one of ``count`` owners; if that is none, one shard of one row
    """
    cdef int64_t stop
    shards.num_shards, shards.bits = 1, 0
    while 2 * shards.num_shards <= min(<int64_t>MOST_SHARDS, capacity // ROWS_PER_SHARD):
        shards.num_shards *= 2
        shards.bits += 1
    # 1.6 slots per row, and one that is always empty.
    shards.slots = (-(-capacity // shards.num_shards) * 8 + 4) // 5 + 1
    shards.first_shard, stop = rank * shards.num_shards // count, (rank + 1) * shards.num_shards // count
    shards.num_shards = (stop - shards.first_shard) >> min(sample_bits, shards.bits)
    shards.kept = (<uint64_t>1 << (shards.bits - min(sample_bits, shards.bits))) - 1
    shards.first_row = first_row_of(shards, capacity, shards.first_shard)
    shards.capacity = first_row_of(shards, capacity, shards.first_shard + shards.num_shards) - shards.first_row
    if shards.num_shards == 0:
        shards.num_shards = shards.capacity = 1


cdef inline int64_t first_row_of(const Shards* shards, int64_t capacity, int64_t shard) noexcept nogil:
    """The first row of a shard, both counted among all; the first shards have one row more than the others."""
    return shard * (capacity >> shards.bits) + min(shard, capacity & ((<int64_t>1 << shards.bits) - 1))


cdef size_t shards_bytes(const Shards* shards) noexcept nogil:
    """Bytes of entries, keys, free rows and counts; without candidates. The shards may not be allocated yet."""
    cdef size_t count_bytes = sizeof(uint32_t) if shards.policy.evict == EVICT_LFU else 0
    return (shards.num_shards * shards.slots * sizeof(KeyEntry)
            + <size_t>shards.capacity * (sizeof(id_t) + sizeof(int32_t) + count_bytes))


cdef int shards_init(Shards* shards, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil:
    """Allocate empty shards; policy and salts are set. Returns -1 if there is no memory: ``shards_free`` must follow."""
    cdef int64_t s, first, rows = capacity
    shards_divide(shards, capacity, sample_bits, rank, count)
    capacity = shards.capacity
    shards.newest, shards.mostly_new = -1, True
    shards.entries = <KeyEntry*>penstock_allocate(shards.num_shards * shards.slots * sizeof(KeyEntry))
    shards.keys = <id_t*>penstock_allocate(capacity * sizeof(id_t))
    shards.free_rows = <int32_t*>penstock_allocate(capacity * sizeof(int32_t))
    shards.each = <Shard*>calloc(shards.num_shards, sizeof(Shard))
    if shards.policy.evict == EVICT_LFU:
        shards.counts = <uint32_t*>penstock_allocate_zeroed(capacity * sizeof(uint32_t))
        if shards.counts == NULL:
            return -1
    if shards.entries == NULL or shards.keys == NULL or shards.free_rows == NULL or shards.each == NULL:
        return -1
    for s in range(shards.num_shards):
        first = first_row_of(shards, rows, shards.first_shard + s)
        shards.each[s].first_row = <int32_t>(first - shards.first_row)
        shards.each[s].num_rows = <int32_t>(min(first_row_of(shards, rows, shards.first_shard + s + 1) - first, capacity))
        free_all(shards, &shards.each[s])
        key_clear(shards.entries + s * shards.slots, shards.slots)
    return 0


cdef void free_all(Shards* shards, Shard* shard) noexcept nogil:
    """All rows are free, and the first one is used first."""
    cdef int32_t i
    shard.num_free = shard.num_rows
    for i in range(shard.num_rows):
        shards.free_rows[shard.first_row + i] = shard.first_row + shard.num_rows - 1 - i


cdef void shards_free(Shards* shards) noexcept nogil:
    cdef int64_t s
    if shards.entries != NULL:
        penstock_release(shards.entries, shards.num_shards * shards.slots * sizeof(KeyEntry))
    if shards.keys != NULL:
        penstock_release(shards.keys, shards.capacity * sizeof(id_t))
    if shards.free_rows != NULL:
        penstock_release(shards.free_rows, shards.capacity * sizeof(int32_t))
    if shards.counts != NULL:
        penstock_release(shards.counts, shards.capacity * sizeof(uint32_t))
    free(shards.touched)
    if shards.each != NULL:
        for s in range(shards.num_shards):
            free(shards.each[s].young.entries)
            free(shards.each[s].old.entries)
            free(shards.each[s].lately.prints)
            free(shards.each[s].before.prints)
        free(shards.each)


cdef void age(Shards* shards, Shard* shard, int64_t generation) noexcept nogil:
    """Swap the generations of a shard's candidates as often as those of the whole directory were."""
    cdef int64_t swaps = generation - shard.generation
    shard.generation = generation
    if swaps >= 2:
        candidates_clear(&shard.young)
    if swaps >= 1:
        shard.young, shard.old = shard.old, shard.young
        candidates_clear(&shard.young)


cdef KeyEntry* find_candidate(Shards* shards, uint64_t mixed) noexcept nogil:
    """The entry of a candidate, in either generation; NULL: none."""
    cdef Shard* shard = &shards.each[shard_of(shards, mixed)]
    cdef KeyEntry* entry
    age(shards, shard, shards.generation)
    entry = candidate_of(&shard.young, shards.bits, mixed)
    return entry if entry != NULL else candidate_of(&shard.old, shards.bits, mixed)


cdef KeyEntry* candidate_of(const Candidates* candidates, int bits, uint64_t mixed) noexcept nogil:
    cdef KeyEntry* entry
    if candidates.size == 0:
        return NULL
    entry = key_find(candidates.entries, candidates.slots, bits, mixed)
    return entry if entry.value >= 0 else NULL


cdef void candidates_clear(Candidates* candidates) noexcept nogil:
    if candidates.size:
        key_clear(candidates.entries, candidates.slots)
    candidates.size = 0


cdef int candidates_reserve(Candidates* candidates, size_t num_keys, int bits) noexcept nogil:
    """Make room for num_keys in all. Returns -1, and has changed nothing, if there is no memory."""
    cdef Candidates bigger
    cdef size_t slot
    if num_keys * 8 <= candidates.slots * 5:
        return 0
    bigger.slots = max(num_keys * 2 + num_keys // 2, <size_t>16)
    bigger.size = candidates.size
    bigger.entries = <KeyEntry*>malloc(bigger.slots * sizeof(KeyEntry))
    if bigger.entries == NULL:
        return -1
    key_clear(bigger.entries, bigger.slots)
    for slot in range(candidates.slots):
        if candidates.entries[slot].value >= 0:
            key_find(bigger.entries, bigger.slots, bits, candidates.entries[slot].mixed)[0] = candidates.entries[slot]
    free(candidates.entries)
    candidates[0] = bigger
    return 0
