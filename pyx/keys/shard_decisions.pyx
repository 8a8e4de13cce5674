"""What an opening does to each virtual shard: admission, room and rows are decided first, and carried out afterwards.

A shard has one thread.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.key_shards cimport (
    AHEAD, EVICT_LFU, FAR_AHEAD, Candidates, KeyEntry, KeyRank, Shard, Shards, age, candidate_of, candidates_clear,
    candidates_reserve, decayed, find, home_of, is_expired, key_find, key_home, key_remove, key_unmix, philox_block,
    philox_unit, rank_lowest, rank_nearly_sorted, removed_add, removed_has, removed_reserve, shard_of,
)
from penstock.pyx.prefetch cimport prefetch, prefetch_kept

cdef enum:
    SPARE = 16              # an eviction leaves a shard's rows // SPARE free
    FAR = 96                # entries: a shard was last used steps ago, and its memory arrives slowly
    BUCKETS = 512           # of scores

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


cdef struct Lowest:         # of a shard's scores
    Py_ssize_t num          # how many
    uint32_t low, most
    int shift               # 0: a bucket has one score
    Py_ssize_t[BUCKETS + 1] places


cdef int decide(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Decide about a shard; memory for candidates and removed keys may grow, nothing else changes.

    Returns -1 if there is no memory.
    """
    cdef Shard* shard = &opening.shards.each[s]
    cdef Decision* decision = &opening.each[s]
    cdef AbsentKey* key
    cdef Py_ssize_t j, begin = opening.first[s], end = opening.last[s], num_free, wanted = 0
    if begin == end and not is_due(opening, s):
        return 0
    age(opening.shards, shard, opening.shards.generation)
    for j in range(begin, end):
        if j + AHEAD < end_ahead(opening, s):
            prefetch_kept(opening.key_rows + opening.absent_keys[j + AHEAD].position)
            prefetch_candidate(opening, opening.absent_keys[j + AHEAD].mixed)
        decision.num_back += opening.absent_keys[j].value != ABSENT
        opening.fate[j] = ADMITTED if is_admitted(opening, shard, &opening.absent_keys[j]) else WAITS
        wanted += opening.fate[j] == ADMITTED
    if make_room(opening, s, wanted) < 0:
        return -1
    num_free = shard.num_free + decision.num_expired + decision.num_evicted
    if wanted > num_free:
        if reject(opening, s, wanted, num_free) < 0:
            return -1
    for j in range(begin, end):
        key = &opening.absent_keys[j]
        if opening.fate[j] == ADMITTED:
            key.value = free_row(opening, s, decision.num_admitted)
            opening.key_rows[key.position] = key.value
            decision.num_admitted += 1
        else:
            opening.key_rows[key.position] = ABSENT
            decision.unadmitted_rows += rows_of(opening, key.position)
    if reserve_removed(shard, decision.num_expired + decision.num_evicted) < 0:
        return -1
    return reserve(opening, shard, end - begin - decision.num_admitted)


cdef inline Py_ssize_t end_ahead(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """The end of the keys that a shard's thread reads ahead: also the next shards', for a shard often has but a few,
    unless another thread may be changing those."""
    return opening.num_listed if opening.alone else opening.last[s]


cdef inline void prefetch_candidate(const Opening* opening, uint64_t mixed) noexcept nogil:
    """Prefetch where a key would be among the candidates."""
    cdef const Shards* shards = opening.shards
    cdef const Shard* shard = &shards.each[shard_of(shards, mixed)]
    if shard.young.size:
        prefetch_kept(shard.young.entries + key_home(mixed, shards.bits, shard.young.slots))
    if shard.old.size:
        prefetch_kept(shard.old.entries + key_home(mixed, shards.bits, shard.old.slots))


cdef inline bint is_admitted(const Opening* opening, const Shard* shard, AbsentKey* key) noexcept nogil:
    """Whether a key is admitted if there is room. Sets its value to the occurrences so far."""
    cdef const Shards* shards = opening.shards
    cdef int64_t swaps = opening.generation - shard.generation, occurrences
    cdef uint64_t[4] words
    cdef KeyEntry* entry
    key.value = 0
    if opening.admit_all:
        return True
    occurrences = rows_of(opening, key.position)
    if shards.policy.by_chance:
        philox_block(key_unmix(key.mixed, shards.salt), <uint64_t>opening.step, shards.chance, words)
        return philox_unit(words[0]) >= power(1 - shards.policy.probability, occurrences)
    if shards.policy.by_frames:
        occurrences = 1 if opening.frames == NULL else opening.frames[key.position]
    if swaps < 2 and shard.young.size + shard.old.size:
        entry = candidate_of(&shard.young, shards.bits, key.mixed)
        if entry == NULL and swaps == 0:
            entry = candidate_of(&shard.old, shards.bits, key.mixed)
        if entry != NULL:
            occurrences += entry.value
    key.value = <int32_t>min(occurrences, <int64_t>0x7fffffff)
    return key.value >= shards.policy.min_count


cdef int make_room(const Opening* opening, Py_ssize_t s, Py_ssize_t wanted) noexcept nogil:
    """List what is removed: expired keys that occur, all expired keys if the shard is swept or short, and victims.
    Returns -1 if there is no memory."""
    cdef const Shards* shards = opening.shards
    cdef const Shard* shard = &shards.each[s]
    cdef Decision* decision = &opening.each[s]
    cdef KeyEntry* entries = shards.entries + s * shards.slots
    cdef Py_ssize_t j, short, num_expired = decision.num_back
    cdef uint32_t* scores = NULL
    cdef Lowest lowest
    cdef size_t slot
    lowest.num = 0
    if wanted > shard.num_free + decision.num_back or is_due(opening, s):
        scores = <uint32_t*>malloc(shards.slots * sizeof(uint32_t))
        if scores == NULL:
            return -1
        num_expired = score_all(opening, entries, scores)
        short = max(wanted - shard.num_free - num_expired, <Py_ssize_t>0) if shards.policy.evict else 0
        if short:
            decision.num_evicted = short + shard.num_rows // SPARE
            lowest_scores(scores, shards.slots, decision.num_evicted, &lowest)
            decision.num_evicted = min(decision.num_evicted, lowest.num)
    if num_expired + lowest.num:
        decision.removed = <KeyRank*>malloc((num_expired + lowest.num) * sizeof(KeyRank))
        if decision.removed == NULL:
            free(scores)
            return -1
    if scores == NULL:
        for j in range(opening.first[s], opening.last[s] if num_expired else opening.first[s]):
            if opening.key_rows[opening.absent_keys[j].position] != ABSENT:
                fill(&decision.removed[decision.num_expired], find(shards, opening.absent_keys[j].mixed), 0)
                decision.num_expired += 1
        rank_lowest(decision.removed, num_expired, num_expired)
    elif num_expired + lowest.num:
        for slot in range(shards.slots):
            if num_expired and entries[slot].value >= 0 and is_expired(shards, &entries[slot], opening.clock):
                fill(&decision.removed[decision.num_expired], &entries[slot], 0)
                decision.num_expired += 1
            elif lowest.num and scores[slot] <= lowest.most:
                fill(&decision.removed[num_expired + lowest_place(&lowest, scores[slot])], &entries[slot], scores[slot])
        # The place of an entry follows from its mixed key, so that entries of one score are nearly in order.
        rank_nearly_sorted(decision.removed, num_expired)
        if lowest.shift == 0:
            rank_nearly_sorted(decision.removed + num_expired, lowest.num)
        else:
            rank_lowest(decision.removed + num_expired, lowest.num, decision.num_evicted)
    free(scores)
    return 0


cdef void fill(KeyRank* rank, const KeyEntry* entry, uint32_t score) noexcept nogil:
    rank.mixed, rank.score, rank.value = entry.mixed, score, entry.value


cdef bint is_due(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Whether a shard is swept at this opening: once in every period, at a place that depends on the step alone."""
    cdef int64_t period = opening.shards.policy.sweep_period
    if period <= 0 or opening.admit_all or opening.shards.policy.expire_after < 0:
        return False
    return opening.step % period == (opening.shards.first_shard + s) * period >> opening.shards.bits


cdef int reject(const Opening* opening, Py_ssize_t s, Py_ssize_t wanted, Py_ssize_t num_free) noexcept nogil:
    """Of the admitted keys keep those with the lowest mixed keys. Returns -1 if there is no memory."""
    cdef Py_ssize_t j, k = 0
    cdef KeyRank* ranks = <KeyRank*>malloc(wanted * sizeof(KeyRank))
    if ranks == NULL:
        return -1
    for j in range(opening.first[s], opening.last[s]):
        if opening.fate[j] == ADMITTED:
            ranks[k].mixed, ranks[k].score = opening.absent_keys[j].mixed, 0
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
    cdef const Shard* shard = &opening.shards.each[s]
    cdef const Decision* decision = &opening.each[s]
    cdef Py_ssize_t num_removed = decision.num_expired + decision.num_evicted
    if k < num_removed:
        return decision.removed[num_removed - 1 - k].value
    return opening.shards.free_rows[shard.first_row + shard.num_free - 1 - (k - num_removed)]


cdef bint keeps_candidates(const Opening* opening) noexcept nogil:
    return not opening.shards.policy.by_chance and not opening.admit_all


cdef int reserve(const Opening* opening, Shard* shard, Py_ssize_t num_waiting) noexcept nogil:
    """Make room for candidates in the generation that will be the younger one. Returns -1 if there is no memory."""
    if num_waiting == 0 or not keeps_candidates(opening):
        return 0
    if opening.generation == shard.generation:
        return candidates_reserve(&shard.young, shard.young.size + num_waiting, opening.shards.bits)
    return candidates_reserve(&shard.old, max(shard.old.size, <size_t>num_waiting), opening.shards.bits)


cdef int reserve_removed(Shard* shard, Py_ssize_t num_keys) noexcept nogil:
    """Make room for so many removed keys: ``before`` needs memory when ``lately`` is full. Returns -1 if there is none."""
    if num_keys == 0:
        return 0
    if shard.lately.size + <size_t>num_keys > <size_t>shard.num_rows:
        if removed_reserve(&shard.before, shard.num_rows) < 0:
            return -1
    return removed_reserve(&shard.lately, shard.num_rows)


cdef int change(const Opening* opening, Py_ssize_t s) noexcept nogil:
    """Carry out what was decided about a shard."""
    cdef Shards* shards = opening.shards
    cdef Shard* shard = &shards.each[s]
    cdef Decision* decision = &opening.each[s]
    cdef KeyEntry* entries = shards.entries + s * shards.slots
    cdef KeyEntry* entry
    cdef const AbsentKey* key
    cdef Py_ssize_t j, k, begin = opening.first[s], end = opening.last[s]
    cdef Py_ssize_t num_removed = decision.num_expired + decision.num_evicted
    cdef uint64_t mixed
    if begin == end and num_removed == 0:
        return 0
    age(shards, shard, opening.generation)
    for k in range(num_removed):
        if k + AHEAD < num_removed:
            mixed = decision.removed[k + AHEAD].mixed
            prefetch_kept(entries + key_home(mixed, shards.bits, shards.slots))
            prefetch_kept(shard.lately.prints + key_home(mixed, shards.bits, shard.lately.slots))
        mixed = decision.removed[k].mixed
        key_remove(entries, shards.slots, shards.bits, key_find(entries, shards.slots, shards.bits, mixed))
        removed_add(&shard.lately, &shard.before, shard.num_rows, shards.bits, mixed)
    for k in range(num_removed - decision.num_admitted):
        shards.free_rows[shard.first_row + shard.num_free + k] = decision.removed[k].value
    shard.num_free += <int32_t>(num_removed - decision.num_admitted)
    for j in range(begin, end):
        key = &opening.absent_keys[j]
        mixed = key.mixed
        if j + FAR_AHEAD < opening.num_listed:
            prefetch_kept(shards.entries + home_of(shards, opening.absent_keys[j + FAR_AHEAD].mixed))
        if j + AHEAD < end_ahead(opening, s):
            prefetch_candidate(opening, opening.absent_keys[j + AHEAD].mixed)
        if opening.fate[j] == ADMITTED:
            entry = key_find(entries, shards.slots, shards.bits, mixed)
            entry.mixed, entry.value, entry.last = mixed, key.value, <uint32_t>opening.clock
            shards.keys[key.value] = <id_t>key_unmix(mixed, shards.salt)
            if shards.counts != NULL:
                shards.counts[key.value] = 0
            if shard.young.size + shard.old.size:
                drop_candidate(&shard.young, shards.bits, mixed)
                drop_candidate(&shard.old, shards.bits, mixed)
            decision.num_returned += (removed_has(&shard.lately, shards.bits, mixed)
                                 or removed_has(&shard.before, shards.bits, mixed))
        elif keeps_candidates(opening):
            drop_candidate(&shard.old, shards.bits, mixed)
            entry = key_find(shard.young.entries, shard.young.slots, shards.bits, mixed)
            shard.young.size += entry.value < 0
            entry.mixed, entry.value, entry.last = mixed, key.value, <uint32_t>opening.clock
    if shards.policy.forget_after < 0 and shard.young.size >= <size_t>shard.num_rows:
        shard.young, shard.old = shard.old, shard.young
        candidates_clear(&shard.young)
    shard.counts.admitted += decision.num_admitted
    shard.counts.expired += decision.num_expired
    shard.counts.evicted += decision.num_evicted
    shard.counts.returned += decision.num_returned
    shard.counts.rejected += decision.num_rejected
    shard.counts.unadmitted_rows += decision.unadmitted_rows
    return 0


cdef void drop_candidate(Candidates* candidates, int bits, uint64_t mixed) noexcept nogil:
    cdef KeyEntry* entry = candidate_of(candidates, bits, mixed)
    if entry != NULL:
        key_remove(candidates.entries, candidates.slots, bits, entry)
        candidates.size -= 1


cdef double power(double base, int64_t exponent) noexcept nogil:
    """base ** exponent by squaring, so that every machine rounds alike."""
    cdef double result = 1
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


# ---- victims: whether an entry is empty, or among the lowest, is as good as random. The loops over all entries
# therefore have no branch that depends on it, which a processor would predict wrongly, and only the lowest scores are
# sorted.


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


cdef inline Py_ssize_t lowest_place(Lowest* lowest, uint32_t score) noexcept nogil:
    """The place of the next entry of this score among the lowest, which are in order but for those of one bucket."""
    cdef Py_ssize_t* place = &lowest.places[(score - lowest.low) >> lowest.shift]
    place[0] += 1
    return place[0] - 1
