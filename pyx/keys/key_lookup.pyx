"""The keys of an opening: found and stamped, and the absent ones partitioned by shard.

Where most keys are present, they are found chunk by chunk, without partitioning; where most are new, all are partitioned
first, so that everything else is done to one shard at a time, whose entries fit in a cache. Both list the absent keys of
a shard by position. No two threads touch one entry: keys are distinct, and a chunk or a shard has one thread. Finding a
key also stamps it, which saves a second pass over memory; ``take_back`` restores the stamps.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memset

from penstock.pyx.keys.key_shards cimport (
    AHEAD, FAR_AHEAD, MAX_CLOCK, KeyEntry, Shards, decayed, find, home_of, is_expired, key_find, key_find_from, key_home,
    shard_of,
)
from penstock.pyx.keys.shard_decisions cimport ABSENT, CHUNK, AbsentKey, Opening, mixed_of, num_chunks, rows_of
from penstock.pyx.prefetch cimport prefetch_write


cdef int find_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Find and stamp the keys of a chunk, and list and count the absent ones: expired keys are absent, too."""
    cdef const Shards* shards = opening.shards
    cdef int32_t* places = opening.places + chunk * shards.num_shards
    cdef Py_ssize_t i, begin = chunk * CHUNK, end = min(begin + CHUNK, opening.num_keys), num_absent = 0
    cdef uint64_t[AHEAD] mixed
    cdef size_t[AHEAD] place
    cdef uint64_t key_bits
    cdef size_t home, base
    cdef uint32_t clock = <uint32_t>opening.clock
    cdef KeyEntry* entry
    memset(places, 0, shards.num_shards * sizeof(int32_t))
    for i in range(begin - AHEAD, end):
        if i >= begin:
            key_bits, base = mixed[i & (AHEAD - 1)], place[i & (AHEAD - 1)]
        if i + AHEAD < end:
            mixed[i & (AHEAD - 1)] = mixed_of(opening, i + AHEAD)
            place[i & (AHEAD - 1)] = home_of(shards, mixed[i & (AHEAD - 1)])
            prefetch_write(shards.entries + place[i & (AHEAD - 1)])
        if i < begin:
            continue
        home = base % shards.slots
        entry = key_find_from(shards.entries + (base - home), shards.slots, key_bits, home)
        if entry.value >= 0 and not is_expired(shards, entry, opening.clock):
            opening.key_rows[i], opening.stamps[i] = entry.value, entry.last
            entry.last = clock
        else:
            opening.key_rows[i] = ABSENT if entry.value < 0 else -2 - entry.value
            opening.listed[begin + num_absent] = <int32_t>i
            num_absent += 1
            places[shard_of(shards, key_bits)] += 1
    opening.in_chunk[chunk] = <int32_t>num_absent
    return 0


cdef int list_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Count all keys of a chunk, to be found later."""
    cdef const Shards* shards = opening.shards
    cdef int32_t* places = opening.places + chunk * shards.num_shards
    cdef Py_ssize_t i, begin = chunk * CHUNK, end = min(begin + CHUNK, opening.num_keys)
    memset(places, 0, shards.num_shards * sizeof(int32_t))
    for i in range(begin, end):
        opening.key_rows[i] = ABSENT
        places[shard_of(shards, mixed_of(opening, i))] += 1
    opening.in_chunk[chunk] = <int32_t>(end - begin)
    return 0


cdef Py_ssize_t place_chunks(const Opening* opening) noexcept nogil:
    """Turn the counts of listed keys into places by shard, and return their number."""
    cdef Py_ssize_t s, chunk, n = 0, num_shards = opening.shards.num_shards
    cdef int32_t count
    cdef int32_t* places
    memset(opening.last, 0, num_shards * sizeof(Py_ssize_t))
    for chunk in range(num_chunks(opening)):
        places = opening.places + chunk * num_shards
        for s in range(num_shards):
            opening.last[s] += places[s]
    for s in range(num_shards):
        opening.first[s] = n
        n += opening.last[s]
        opening.last[s] = opening.first[s]
    for chunk in range(num_chunks(opening)):
        places = opening.places + chunk * num_shards
        for s in range(num_shards):
            count = places[s]
            places[s] = <int32_t>opening.last[s]
            opening.last[s] += count
    return n


cdef int deal_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Deal the listed keys of a chunk to their shards."""
    cdef const Shards* shards = opening.shards
    cdef int32_t* places = opening.places + chunk * shards.num_shards
    cdef Py_ssize_t i, k, s, begin = chunk * CHUNK
    cdef uint64_t mixed
    cdef AbsentKey* key
    for k in range(begin, begin + opening.in_chunk[chunk]):
        i = k if opening.listed == NULL else opening.listed[k]
        mixed = mixed_of(opening, i)
        s = shard_of(shards, mixed)
        key = &opening.absent_keys[places[s]]
        places[s] += 1
        prefetch_write(key + 4)  # the shard's next line
        key.mixed, key.position, key.value = mixed, <int32_t>i, <int32_t>opening.key_rows[i]
    return 0


cdef int find_absent(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Find and stamp the keys of a shard, and keep the absent ones."""
    cdef const Shards* shards = opening.shards
    cdef KeyEntry* entries = shards.entries + s * shards.slots
    cdef KeyEntry* entry
    cdef AbsentKey* absent_keys = opening.absent_keys
    cdef Py_ssize_t j, i, begin = opening.first[s], end = opening.last[s], last = begin
    for j in range(begin - FAR_AHEAD, end):
        if j + FAR_AHEAD < end:
            prefetch_write(entries + key_home(absent_keys[j + FAR_AHEAD].mixed, shards.bits, shards.slots))
        if j < begin:
            continue
        i = absent_keys[j].position
        entry = key_find(entries, shards.slots, shards.bits, absent_keys[j].mixed)
        if entry.value >= 0 and not is_expired(shards, entry, opening.clock):
            opening.key_rows[i], opening.stamps[i] = entry.value, entry.last
            entry.last = <uint32_t>opening.clock
            continue
        absent_keys[last] = absent_keys[j]
        if entry.value >= 0:
            opening.key_rows[i] = absent_keys[last].value = -2 - entry.value
        last += 1
    opening.last[s] = last
    return 0


cdef void take_back(const Opening* opening, bint decided) noexcept nogil:
    """Take back the stamps of the keys found. decided : absent keys may have got a row"""
    cdef Py_ssize_t s, j, i, chunk
    for s in range(opening.shards.num_shards if decided else 0):
        for j in range(opening.first[s], opening.last[s]):
            opening.key_rows[opening.absent_keys[j].position] = ABSENT
    for chunk in range(num_chunks(opening)):
        if opening.in_chunk[chunk] >= 0:
            for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, opening.num_keys)):
                if opening.key_rows[i] >= 0:
                    find(opening.shards, mixed_of(opening, i)).last = opening.stamps[i]


cdef int count_chunk(const Opening* opening, Py_ssize_t chunk) noexcept nogil:
    """Add the occurrences of a chunk's keys to LFU's counts."""
    cdef const Shards* shards = opening.shards
    cdef Py_ssize_t i
    cdef uint32_t before
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, opening.num_keys)):
        if opening.key_rows[i] >= 0:
            before = decayed(shards, shards.counts[opening.key_rows[i]], opening.stamps[i], opening.clock)
            shards.counts[opening.key_rows[i]] = <uint32_t>min(MAX_CLOCK, before + rows_of(opening, i))
    return 0
