"""Victims of an eviction of keys from a dynamic table: the scores of a shard's entries, and the lowest of them.

Whether an entry is empty, or among the lowest, is as good as random. The loops over all entries therefore have no branch
that depends on it, which a processor would predict wrongly, and only the lowest scores are sorted.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from penstock.pyx.keys.key_shards cimport EVICT_LFU, KeyEntry, Shards, decayed
from penstock.pyx.keys.shard_decisions cimport Opening
from penstock.pyx.prefetch cimport prefetch

cdef enum:
    FAR = 96                # entries: a shard was last used steps ago, and its memory arrives slowly

cdef extern from *:
    """
    #define PENSTOCK_STAYS 0xffffffffu
    /* The score of one entry by its last clock. spared: the clock of keys that stay; expired: counts them */
    static inline uint32_t penstock_score(int32_t value, uint32_t last, int64_t clock, int64_t after, int64_t spared,
                                          int64_t* expired) {
        int has_expired = (value >= 0) & (clock - (int64_t)last > after);
        *expired += has_expired;
        return last | -(uint32_t)((value < 0) | has_expired | ((int64_t)last == spared));
    }
    /* The bucket of a score, from ``low`` on; the last one for STAYS, which the large number brings there. */
    static inline uint64_t penstock_bucket(uint32_t score, uint32_t low, int shift, uint64_t last) {
        uint64_t bucket = ((uint64_t)(score - low) + ((uint64_t)(score == PENSTOCK_STAYS) << 60)) >> shift;
        return bucket < last ? bucket : last;
    }
    """
    const uint32_t STAYS "PENSTOCK_STAYS"   # in place of a score; scores end below
    uint32_t penstock_score(int s, uint32_t last, int64_t clock, int64_t after, int64_t spared, int64_t* n) noexcept nogil
    uint64_t penstock_bucket(uint32_t score, uint32_t low, int shift, uint64_t last) noexcept nogil


cdef Py_ssize_t score_all(const Opening* opening, const KeyEntry* entries, uint32_t* scores) noexcept nogil:
    """Score a shard's entries: the lowest are evicted first. STAYS: the entry is empty, expired, or of a key that occurs.
    Returns how many are expired."""
    cdef const Shards* shards = opening.shards
    cdef int64_t num_expired = 0, clock = opening.clock, after = shards.policy.expire_after
    cdef int64_t spared = -1 if opening.marked else clock
    cdef size_t slot
    if after < 0:
        after = 1 << 62
    for slot in range(shards.slots):
        prefetch(entries + slot + FAR)
        scores[slot] = penstock_score(entries[slot].value, entries[slot].last, clock, after, spared, &num_expired)
    if opening.marked or shards.policy.evict == EVICT_LFU:
        for slot in range(shards.slots):
            if scores[slot] == STAYS:
                continue
            if opening.marked and shards.touched[entries[slot].value >> 3] >> (entries[slot].value & 7) & 1:
                scores[slot] = STAYS
            elif shards.policy.evict == EVICT_LFU:
                scores[slot] = decayed(shards, shards.counts[entries[slot].value], entries[slot].last, clock)
    return num_expired


cdef void lowest_scores(const uint32_t* scores, size_t slots, Py_ssize_t wanted, Lowest* lowest) noexcept nogil:
    """Find as few of the lowest scores as possible, but at least ``wanted`` or all: exactly where the scores are within
    BUCKETS of each other, else in coarse steps."""
    cdef Py_ssize_t count, n = 0, bucket = 0
    cdef uint32_t low = STAYS, high = 0
    cdef int shift = 0
    cdef size_t slot
    lowest.num = lowest.shift = 0
    for slot in range(slots):
        low = min(low, scores[slot])
        high = max(high, <uint32_t>(scores[slot] + 1))  # 0 for STAYS
    if high == 0:
        return
    high -= 1
    while (high - low) >> shift >= BUCKETS:
        shift += 1
    memset(lowest.places, 0, sizeof(lowest.places))
    for slot in range(slots):
        lowest.places[penstock_bucket(scores[slot], low, shift, BUCKETS)] += 1
    while n < wanted and bucket < BUCKETS:
        count = lowest.places[bucket]
        lowest.places[bucket] = n
        n += count
        bucket += 1
    lowest.num, lowest.low, lowest.shift = n, low, shift
    lowest.most = <uint32_t>min(<uint64_t>high, low + (<uint64_t>bucket << shift) - 1)
