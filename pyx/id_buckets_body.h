/* The search for a chunk of ids; included by id_buckets.h once per instruction set. */

/* A bit per lane in use. */
TARGET static inline uint32_t ISA(full_lanes)(const Bucket *bucket, uint32_t base) {
#if defined(PENSTOCK_AVX512_BODY)
    return _mm256_cmpge_epu32_mask(_mm256_load_si256((const __m256i *)bucket->slots), _mm256_set1_epi32(base));
#elif defined(PENSTOCK_AVX2_BODY)
    __m256i slots = _mm256_load_si256((const __m256i *)bucket->slots);
    __m256i full = _mm256_cmpeq_epi32(_mm256_max_epu32(slots, _mm256_set1_epi32(base)), slots);
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(full));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(bucket->slots[lane] >= base) << lane;
    return lanes;
#endif
}

/* A bit per lane in use that has this key. */
TARGET static inline uint32_t ISA(lanes_with)(const Bucket *bucket, uint32_t key, uint32_t full) {
#if defined(PENSTOCK_AVX512_BODY)
    return _mm256_mask_cmpeq_epi32_mask(full, _mm256_load_si256((const __m256i *)bucket->keys), _mm256_set1_epi32(key));
#elif defined(PENSTOCK_AVX2_BODY)
    __m256i same = _mm256_cmpeq_epi32(_mm256_load_si256((const __m256i *)bucket->keys), _mm256_set1_epi32(key));
    return full & (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; lane++) lanes |= (uint32_t)(bucket->keys[lane] == key) << lane;
    return full & lanes;
#endif
}

/* The slot of an id that was missed. Its home bucket most often has a free lane and no such key. */
TARGET static inline uint32_t ISA(missed_slot)(IdBuckets *t, int64_t id, uint32_t home, uint32_t key, int64_t *held) {
    Bucket *bucket = &t->buckets[home];
    uint32_t full = ISA(full_lanes)(bucket, t->base);
    uint32_t lane = (uint32_t)__builtin_ctz(~full);
    if (lane == LANES || ISA(lanes_with)(bucket, key, full)) return id_slot(t, id, held);
    held[t->num_ids] = id;
    bucket->keys[lane] = key;
    bucket->slots[lane] = t->base + t->num_ids;
    return t->num_ids++ | NEW_ID;
}

TARGET static inline void ISA(find_chunk_of)(IdBuckets *t, const int64_t *ids, long n, int64_t *held, uint32_t *slots,
                                             int wide) {
    uint32_t homes[ID_CHUNK], keys[ID_CHUNK], missed[ID_CHUNK];
    const Bucket *buckets = t->buckets;
    const uint32_t base = t->base;
    long num_missed = 0;
    for (long i = 0; i < n; i++) {
        uint64_t mixed = mixed_id(ids[i], wide);
        homes[i] = (uint32_t)(mixed >> t->shift);
        keys[i] = key_of(ids[i], mixed, wide);
    }
    for (long i = 0; i < n && i < BUCKETS_AHEAD; i++) __builtin_prefetch(&buckets[homes[i]], 1);
    for (long i = 0; i < n; i++) {
        const Bucket *bucket = &buckets[homes[i]];
        uint32_t lanes, slot;
        __builtin_prefetch(&buckets[homes[i + BUCKETS_AHEAD < n ? i + BUCKETS_AHEAD : i]], 1);
        lanes = ISA(lanes_with)(bucket, keys[i], ISA(full_lanes)(bucket, base));
        /* No branch: which ids are held cannot be predicted. Where none of the lanes is, the first one is looked at. */
        slot = (bucket->slots[__builtin_ctz(lanes | 1u << LANES) & (LANES - 1)] - base) & -(uint32_t)(lanes != 0);
        slots[i] = slot;
        missed[num_missed] = (uint32_t)i;
        num_missed += (lanes == 0) | (wide && held[slot] != ids[i]);
    }
    for (long i = 0; i < num_missed; i++) {
        uint32_t at = missed[i];
        slots[at] = ISA(missed_slot)(t, ids[at], homes[at], keys[at], held);
    }
}

TARGET static void ISA(find_chunk)(IdBuckets *t, const int64_t *ids, long n, int64_t *held, uint32_t *slots) {
    if (t->wide)
        ISA(find_chunk_of)(t, ids, n, held, slots, 1);
    else
        ISA(find_chunk_of)(t, ids, n, held, slots, 0);
}
