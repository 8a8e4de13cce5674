"""The keys of an opening: found and stamped chunk by chunk, and the absent ones listed by shard.

No two threads touch one entry: keys are distinct, and a chunk has one thread. Finding a key also stamps it, which saves a
second pass over memory; ``unstamp_chunk`` takes that back.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from penstock.pyx.keys.key_shards cimport (
    AHEAD, MAX_CLOCK, KeyEntry, Shards, decayed, find, home_of, is_expired, key_find_from, shard_of,
)
from penstock.pyx.keys.shard_decisions cimport ABSENT, CHUNK, Opening, mixed_of, num_chunks, rows_of

cdef extern from *:
    """
    #define penstock_prefetch_write(address) __builtin_prefetch(address, 1)
    """
    void penstock_prefetch_write(const void* address) nogil


cdef int find_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Find and stamp the keys of a chunk, and list the absent ones: expired keys are absent, too."""
    cdef const Shards* of = opening.of
    cdef Py_ssize_t i, begin = chunk * CHUNK, end = min(begin + CHUNK, opening.num_keys), num_absent = 0
    cdef uint64_t[AHEAD] mixed
    cdef size_t[AHEAD] place
    cdef uint64_t its
    cdef size_t at, base
    cdef uint32_t clock = <uint32_t>opening.clock
    cdef KeyEntry* entry
    for i in range(begin - AHEAD, end):
        if i >= begin:
            its, base = mixed[i & (AHEAD - 1)], place[i & (AHEAD - 1)]
        if i + AHEAD < end:
            mixed[i & (AHEAD - 1)] = mixed_of(opening, i + AHEAD)
            place[i & (AHEAD - 1)] = home_of(of, mixed[i & (AHEAD - 1)])
            penstock_prefetch_write(of.entries + place[i & (AHEAD - 1)])
        if i < begin:
            continue
        at = base % of.slots
        entry = key_find_from(of.entries + (base - at), of.slots, its, at)
        if entry.value >= 0 and not is_expired(of, entry, opening.clock):
            opening.found[i], opening.stamps[i] = entry.value, entry.last
            entry.last = clock
        else:
            opening.found[i] = ABSENT if entry.value < 0 else -2 - entry.value
            opening.stamps[i] = clock
            opening.absent[begin + num_absent] = <int32_t>i
            num_absent += 1
    opening.in_chunk[chunk] = <int32_t>num_absent
    return 0


cdef void unstamp_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Take back what ``find_chunk`` did, if it did."""
    cdef Py_ssize_t i, begin = chunk * CHUNK
    if opening.in_chunk[chunk] < 0:
        return
    for i in range(begin, begin + opening.in_chunk[chunk]):
        opening.found[opening.absent[i]] = ABSENT
    for i in range(begin, min(begin + CHUNK, opening.num_keys)):
        if opening.found[i] >= 0:
            find(opening.of, mixed_of(opening, i)).last = opening.stamps[i]
    opening.in_chunk[chunk] = -1


cdef int count_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Add the occurrences of a chunk's keys to LFU's counts."""
    cdef const Shards* of = opening.of
    cdef Py_ssize_t i
    cdef uint32_t before
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, opening.num_keys)):
        if opening.found[i] >= 0:
            before = decayed(of, of.counts[opening.found[i]], opening.stamps[i], opening.clock)
            of.counts[opening.found[i]] = <uint32_t>min(MAX_CLOCK, before + rows_of(opening, i))
    return 0


cdef void sort_by_shard(const Opening* opening) noexcept nogil:
    """List the absent keys by shard. ``first`` : zeros, two more than there are shards"""
    cdef Py_ssize_t i, chunk, s
    cdef Py_ssize_t* at = opening.first + 1   # moves from the start of a shard to its end, where the next one starts
    for chunk in range(num_chunks(opening)):
        for i in range(chunk * CHUNK, chunk * CHUNK + opening.in_chunk[chunk]):
            at[1 + shard_of(opening.of, mixed_of(opening, opening.absent[i]))] += 1
    for s in range(opening.of.num_shards):
        at[s + 1] += at[s]
    for chunk in range(num_chunks(opening)):
        for i in range(chunk * CHUNK, chunk * CHUNK + opening.in_chunk[chunk]):
            s = shard_of(opening.of, mixed_of(opening, opening.absent[i]))
            opening.order[at[s]] = opening.absent[i]
            at[s] += 1
