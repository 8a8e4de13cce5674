"""What an opening does to each virtual shard: admission, room and rows are decided first, and carried out afterwards.

A shard has one thread.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from penstock.pyx.keys.key_shards cimport (
    AHEAD, Candidates, KeyEntry, KeyRank, Shard, Shards, age, candidate_of, candidates_clear, candidates_reserve,
    find, home_of, is_expired, key_find, key_home, key_remove, philox_block, philox_unit, rank_lowest,
    removed_add, removed_has, removed_reserve, shard_of,
)
from penstock.pyx.keys.victims cimport lowest_scores, score_all

cdef extern from *:
    """
    /* GCC takes a function that does nothing but prefetch for one without effects, and drops its calls; not with this. */
    #define penstock_prefetch(address) do { __builtin_prefetch(address); __asm__ volatile(""); } while (0)
    """
    void prefetch "penstock_prefetch" (const void* address) noexcept nogil

cdef enum:
    SPARE = 16              # an eviction leaves a shard's rows // SPARE free


cdef int decide(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Decide about a shard; memory for candidates and removed keys may grow, nothing else changes.

    Returns -1 if there is no memory.
    """
    cdef Shard* shard = &opening.of.each[s]
    cdef Decision* its = &opening.each[s]
    cdef Py_ssize_t j, i, begin = opening.first[s], end = opening.first[s + 1], num_free, wanted = 0
    if begin == end and not is_due(opening, s):
        return 0
    age(opening.of, shard, opening.of.generation)
    for j in range(begin, end):
        i = opening.order[j]
        prefetch_absent(opening, j)
        opening.fate[j] = ADMITTED if is_admitted(opening, shard, i, &opening.total[j]) else WAITS
        wanted += opening.fate[j] == ADMITTED
        its.num_back += opening.found[i] != ABSENT
    if make_room(opening, s, wanted) < 0:
        return -1
    num_free = shard.num_free + its.num_expired + its.num_evicted
    if wanted > num_free:
        if reject(opening, s, wanted, num_free) < 0:
            return -1
    for j in range(begin, end):
        i = opening.order[j]
        if opening.fate[j] == ADMITTED:
            opening.found[i] = free_row(opening, s, its.num_admitted)
            its.num_admitted += 1
        else:
            opening.found[i] = ABSENT
            its.unadmitted_rows += rows_of(opening, i)
    if its.num_expired + its.num_evicted:
        if removed_reserve(&shard.lately, shard.num_rows) < 0 or removed_reserve(&shard.before, shard.num_rows) < 0:
            return -1
    return reserve(opening, shard, end - begin - its.num_admitted)


cdef inline void prefetch_absent(const Opening* opening, Py_ssize_t j) noexcept nogil:
    """Prefetch what will be needed of absent keys behind the j-th, of the next shards too: a shard often has but a few."""
    cdef const Shards* of = opening.of
    cdef Py_ssize_t num_absent = opening.first[of.num_shards]
    cdef const Shard* shard
    cdef uint64_t mixed
    if j + 2 * AHEAD < num_absent:
        prefetch(opening.keys + opening.order[j + 2 * AHEAD])
        prefetch(opening.found + opening.order[j + 2 * AHEAD])
    if j + AHEAD < num_absent:
        mixed = mixed_of(opening, opening.order[j + AHEAD])
        prefetch(of.entries + home_of(of, mixed))
        shard = &of.each[shard_of(of, mixed)]
        if shard.young.size:
            prefetch(shard.young.entries + key_home(mixed, of.bits, shard.young.slots))
        if shard.old.size:
            prefetch(shard.old.entries + key_home(mixed, of.bits, shard.old.slots))


cdef bint is_admitted(const Opening* opening, const Shard* shard, Py_ssize_t i, int32_t* total) noexcept nogil:
    cdef const Shards* of = opening.of
    cdef int64_t swaps = opening.generation - shard.generation, occurrences = rows_of(opening, i)
    cdef uint64_t[4] words
    cdef KeyEntry* entry
    total[0] = 0
    if opening.admit_all:
        return True
    if of.policy.by_chance:
        philox_block(<uint64_t>opening.keys[i], <uint64_t>opening.step, of.chance, words)
        return philox_unit(words[0]) >= power(1 - of.policy.probability, occurrences)
    if of.policy.by_frames:
        occurrences = 1 if opening.frames == NULL else opening.frames[i]
    if swaps < 2 and shard.young.size + shard.old.size:
        entry = candidate_of(&shard.young, of.bits, mixed_of(opening, i))
        if entry == NULL and swaps == 0:
            entry = candidate_of(&shard.old, of.bits, mixed_of(opening, i))
        if entry != NULL:
            occurrences += entry.value
    total[0] = <int32_t>min(occurrences, <int64_t>0x7fffffff)
    return total[0] >= of.policy.min_count


cdef int make_room(const Opening* opening, Py_ssize_t s, Py_ssize_t wanted) noexcept nogil:
    """List what is removed: expired keys that occur, all expired keys if the shard is swept or short, and victims.
    Returns -1 if there is no memory."""
    cdef const Shards* of = opening.of
    cdef const Shard* shard = &of.each[s]
    cdef Decision* its = &opening.each[s]
    cdef KeyEntry* entries = of.entries + s * of.slots
    cdef Py_ssize_t j, short, num_expired = its.num_back, num_low = 0, num_victims = 0
    cdef uint32_t* scores = NULL
    cdef uint32_t most = 0
    cdef size_t at
    if wanted > shard.num_free + its.num_back or is_due(opening, s):
        scores = <uint32_t*>malloc(of.slots * sizeof(uint32_t))
        if scores == NULL:
            return -1
        num_expired = score_all(opening, entries, scores)
        short = max(wanted - shard.num_free - num_expired, <Py_ssize_t>0) if of.policy.evict else 0
        if short:
            its.num_evicted = short + shard.num_rows // SPARE
            num_low = lowest_scores(scores, of.slots, its.num_evicted, &most)
            its.num_evicted = min(its.num_evicted, num_low)
    if num_expired + num_low:
        its.removed = <KeyRank*>malloc((num_expired + num_low) * sizeof(KeyRank))
        if its.removed == NULL:
            free(scores)
            return -1
    if scores == NULL:
        for j in range(opening.first[s], opening.first[s + 1]):
            if opening.found[opening.order[j]] != ABSENT:
                fill(&its.removed[its.num_expired], find(of, mixed_of(opening, opening.order[j])), 0)
                its.num_expired += 1
    elif num_expired + num_low:
        for at in range(of.slots):
            if num_expired and entries[at].value >= 0 and is_expired(of, &entries[at], opening.clock):
                fill(&its.removed[its.num_expired], &entries[at], 0)
                its.num_expired += 1
            elif num_low and scores[at] <= most:
                fill(&its.removed[num_expired + num_victims], &entries[at], scores[at])
                num_victims += 1
    free(scores)
    rank_lowest(its.removed, num_expired, num_expired)
    rank_lowest(its.removed + num_expired, num_victims, its.num_evicted)
    return 0


cdef void fill(KeyRank* rank, const KeyEntry* entry, uint32_t score) noexcept nogil:
    rank.mixed, rank.score, rank.value = entry.mixed, score, entry.value


cdef bint is_due(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Whether a shard is swept at this opening: once in every period, at a place that depends on the step alone."""
    cdef int64_t period = opening.of.policy.sweep_period
    if period <= 0 or opening.admit_all or opening.of.policy.expire_after < 0:
        return False
    return opening.step % period == s * period >> opening.of.bits


cdef int reject(const Opening* opening, Py_ssize_t s, Py_ssize_t wanted, Py_ssize_t num_free) noexcept nogil:
    """Of the admitted keys keep those with the lowest mixed keys. Returns -1 if there is no memory."""
    cdef Py_ssize_t j, k = 0
    cdef KeyRank* ranks = <KeyRank*>malloc(wanted * sizeof(KeyRank))
    if ranks == NULL:
        return -1
    for j in range(opening.first[s], opening.first[s + 1]):
        if opening.fate[j] == ADMITTED:
            ranks[k].mixed, ranks[k].score = mixed_of(opening, opening.order[j]), 0
            ranks[k].value = <int32_t>(j - opening.first[s])
            k += 1
    rank_lowest(ranks, wanted, num_free)
    for k in range(num_free, wanted):
        opening.fate[opening.first[s] + ranks[k].value] = REJECTED
    opening.each[s].num_rejected = wanted - num_free
    free(ranks)
    return 0


cdef int32_t free_row(const Opening* opening, Py_ssize_t s, Py_ssize_t k) noexcept nogil:
    """The row of the k-th new key: rows that become free first, then those of the stack."""
    cdef const Shard* shard = &opening.of.each[s]
    cdef const Decision* its = &opening.each[s]
    cdef Py_ssize_t num_removed = its.num_expired + its.num_evicted
    if k < num_removed:
        return its.removed[num_removed - 1 - k].value
    return opening.of.free_rows[shard.first_row + shard.num_free - 1 - (k - num_removed)]


cdef bint keeps_candidates(const Opening* opening) noexcept nogil:
    return not opening.of.policy.by_chance and not opening.admit_all


cdef int reserve(const Opening* opening, Shard* shard, Py_ssize_t num_waiting) noexcept nogil:
    """Make room for candidates in the generation that will be the younger one. Returns -1 if there is no memory."""
    if num_waiting == 0 or not keeps_candidates(opening):
        return 0
    if opening.generation == shard.generation:
        return candidates_reserve(&shard.young, shard.young.size + num_waiting, opening.of.bits)
    return candidates_reserve(&shard.old, max(shard.old.size, <size_t>num_waiting), opening.of.bits)


cdef int change(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Carry out what was decided about a shard."""
    cdef Shards* of = opening.of
    cdef Shard* shard = &of.each[s]
    cdef Decision* its = &opening.each[s]
    cdef KeyEntry* entries = of.entries + s * of.slots
    cdef KeyEntry* entry
    cdef Py_ssize_t i, j, k, begin = opening.first[s], end = opening.first[s + 1]
    cdef Py_ssize_t num_removed = its.num_expired + its.num_evicted
    cdef uint64_t mixed
    if begin == end and num_removed == 0:
        return 0
    age(of, shard, opening.generation)
    for k in range(num_removed):
        key_remove(entries, of.slots, of.bits, key_find(entries, of.slots, of.bits, its.removed[k].mixed))
        removed_add(&shard.lately, &shard.before, shard.num_rows, of.bits, its.removed[k].mixed)
    for k in range(num_removed - its.num_admitted):
        of.free_rows[shard.first_row + shard.num_free + k] = its.removed[k].value
    shard.num_free += <int32_t>(num_removed - its.num_admitted)
    for j in range(begin, end):
        i = opening.order[j]
        prefetch_absent(opening, j)
        mixed = mixed_of(opening, i)
        if opening.fate[j] == ADMITTED:
            entry = key_find(entries, of.slots, of.bits, mixed)
            entry.mixed, entry.value, entry.last = mixed, <int32_t>opening.found[i], <uint32_t>opening.clock
            of.keys[opening.found[i]] = opening.keys[i]
            if of.counts != NULL:
                of.counts[opening.found[i]] = 0
            drop_candidate(&shard.young, of.bits, mixed)
            drop_candidate(&shard.old, of.bits, mixed)
            its.num_returned += (removed_has(&shard.lately, of.bits, mixed)
                                 or removed_has(&shard.before, of.bits, mixed))
        elif keeps_candidates(opening):
            drop_candidate(&shard.old, of.bits, mixed)
            entry = key_find(shard.young.entries, shard.young.slots, of.bits, mixed)
            shard.young.size += entry.value < 0
            entry.mixed, entry.value, entry.last = mixed, opening.total[j], <uint32_t>opening.clock
    if of.policy.forget_after < 0 and shard.young.size >= <size_t>shard.num_rows:
        shard.young, shard.old = shard.old, shard.young
        candidates_clear(&shard.young)
    shard.counts.num_admitted += its.num_admitted
    shard.counts.num_expired += its.num_expired
    shard.counts.num_evicted += its.num_evicted
    shard.counts.num_returned += its.num_returned
    shard.counts.num_rejected += its.num_rejected
    shard.counts.unadmitted_rows += its.unadmitted_rows
    return 0


cdef void drop_candidate(Candidates* some, int bits, uint64_t mixed) noexcept nogil:
    cdef KeyEntry* entry = candidate_of(some, bits, mixed)
    if entry != NULL:
        key_remove(some.entries, some.slots, bits, entry)
        some.size -= 1


cdef double power(double base, int64_t exponent) noexcept nogil:
    """base ** exponent by squaring, so that every machine rounds alike."""
    cdef double result = 1
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
