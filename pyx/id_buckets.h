/* Ids → slots, in order of first appearance: a hash table of what is held, not of the vocabulary. Grows, never deletes.
 *
 * A bucket is one cache line: eight keys of 32 bits and their slots. A chunk of ids is first searched, each in its home
 * bucket and without a branch; the few that are missed are then inserted in order. Ids below 2**32 are their own keys; of
 * others, 32 mixed bits are the key, and the id itself is compared.
 */
#ifndef PENSTOCK_ID_BUCKETS_H
#define PENSTOCK_ID_BUCKETS_H

#include "pages.h"
#include "vectors.h"

enum {
    LANES = 8,             /* of a bucket */
    ID_CHUNK = 1024,       /* ids that are looked up in one go */
    BUCKETS_AHEAD = 48,    /* ids whose bucket is asked for before it is needed */
    FEWEST_BUCKETS = 2,
    MOST_SLOTS = INT32_MAX
};

#define NEW_ID 0x80000000u /* of a slot that is returned: the id had none before */

typedef struct {
    uint32_t keys[LANES];
    uint32_t slots[LANES]; /* below the table's base: empty. Full lanes come first. */
} __attribute__((aligned(64))) Bucket;

typedef struct {
    Bucket *buckets;
    size_t num_buckets; /* in use, a power of two */
    size_t reserved;    /* there are so many, a power of two */
    size_t touched;     /* the first ones, which were in use at some time: only these take memory */
    int shift;          /* 64 - log2(num_buckets) */
    int wide;           /* ids may be any int64; else they are below 2**32 */
    int isa;            /* of the loops: vectors.h */
    uint32_t base;      /* of the slots since the table was last cleared, which moves it: no bucket is touched */
    uint32_t num_ids;
} IdBuckets;

static inline uint64_t mixed_id(int64_t id, int wide) {
    uint64_t x = (uint64_t)id;
    if (wide) {
        x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9u;
        x ^= x >> 29;
    }
    return x * 0x9e3779b97f4a7c15u; /* the high bits of the product depend on all bits below them */
}

static inline uint32_t key_of(int64_t id, uint64_t mixed, int wide) { return wide ? (uint32_t)mixed : (uint32_t)id; }

/* At most two thirds of the lanes are full: few ids then lie outside their home bucket. */
static inline size_t buckets_for(size_t num_ids) {
    size_t num_buckets = FEWEST_BUCKETS;
    while (num_buckets * LANES * 2 < num_ids * 3) num_buckets *= 2;
    return num_buckets;
}

/* The slot of an id: the one that it has, or the next one, marked as new. held: the ids by slot, with room for one more */
static inline uint32_t id_slot(IdBuckets *t, int64_t id, int64_t *held) {
    uint64_t mixed = mixed_id(id, t->wide);
    uint32_t key = key_of(id, mixed, t->wide);
    size_t at = (size_t)(mixed >> t->shift);
    for (;; at = (at + 1) & (t->num_buckets - 1)) {
        Bucket *bucket = &t->buckets[at];
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t slot = bucket->slots[lane] - t->base;
            if (bucket->slots[lane] < t->base) {
                held[t->num_ids] = id;
                bucket->keys[lane] = key;
                bucket->slots[lane] = t->base + t->num_ids;
                return t->num_ids++ | NEW_ID;
            }
            if (bucket->keys[lane] == key && held[slot] == id)
                return slot;
        }
    }
}

#define ISA(name) name##_any
#define TARGET
#include "id_buckets_body.h"
#undef TARGET
#undef ISA

#ifdef PENSTOCK_X86
#include <immintrin.h>
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#define PENSTOCK_AVX2_BODY
#include "id_buckets_body.h"
#undef PENSTOCK_AVX2_BODY
#undef TARGET
#undef ISA
#define ISA(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512vl,avx512dq")))
#define PENSTOCK_AVX512_BODY
#include "id_buckets_body.h"
#undef PENSTOCK_AVX512_BODY
#undef TARGET
#undef ISA
#endif

/* Use num_buckets of those reserved, and enter the ids that the table has anew. */
static inline void id_buckets_use(IdBuckets *t, size_t num_buckets, int64_t *held) {
    uint32_t num_ids = t->num_ids;
    t->base += num_ids; /* no lane has an id now */
    t->num_ids = 0;
    t->num_buckets = num_buckets;
    if (num_buckets > t->touched) t->touched = num_buckets;
    for (t->shift = 64; num_buckets > 1; num_buckets /= 2) t->shift--;
    for (uint32_t i = 0; i < num_ids; i++) id_slot(t, held[i], held);
}

/* slots[i]: of ids[i], marked where it is new; new ids are appended to held. Room must have been reserved. */
static inline void id_buckets_find(IdBuckets *t, const int64_t *ids, long n, int64_t *held, uint32_t *slots) {
    for (long at = 0; at < n; at += ID_CHUNK) {
        long chunk = n - at < ID_CHUNK ? n - at : ID_CHUNK;
        size_t wanted = buckets_for(t->num_ids + chunk);
        if (wanted > t->reserved) wanted = t->reserved;
        if (wanted > t->num_buckets) id_buckets_use(t, wanted, held);
        CALL_BEST(t->isa, find_chunk, t, ids + at, chunk, held, slots + at);
    }
}

/* Hold no id. As many buckets stay in use as the same number of ids needs: they stay in the caches. */
static inline void id_buckets_clear(IdBuckets *t) {
    size_t wanted = buckets_for(t->num_ids + 2 * ID_CHUNK);
    t->base += t->num_ids;
    t->num_ids = 0;
    id_buckets_use(t, wanted < t->reserved ? wanted : t->reserved, NULL);
}

/* Make room for num_ids in all, so that finding up to there cannot fail. Returns 0 where there is no memory: nothing has
   changed then. */
static inline int id_buckets_reserve(IdBuckets *t, size_t num_ids, int64_t *held) {
    size_t wanted = buckets_for(num_ids);
    if (wanted > t->reserved) {
        Bucket *buckets = (Bucket *)penstock_allocate_zeroed(wanted * sizeof(Bucket));
        if (buckets == NULL) return 0;
        if (t->buckets != NULL) penstock_release(t->buckets, t->reserved * sizeof(Bucket));
        t->buckets = buckets;
        t->reserved = wanted;
        t->touched = 0;
        t->base = 1;
        id_buckets_use(t, buckets_for(t->num_ids), held);
    } else if (UINT32_MAX - t->base < 4 * num_ids) { /* growing enters every id anew, twice as many each time */
        memset(t->buckets, 0, t->touched * sizeof(Bucket)); /* the others are 0 */
        t->base = 1;
        id_buckets_use(t, t->num_buckets, held);
    }
    return 1;
}

static inline void id_buckets_free(IdBuckets *t) {
    if (t->buckets != NULL) penstock_release(t->buckets, t->reserved * sizeof(Bucket));
    t->buckets = NULL;
    t->reserved = t->touched = 0;
}

#endif
