/* The keys that lost their row lately, by 32 bits of the mixed key: whether a key that is admitted had a row before.
 *
 * Linear probing without deletions. Home and print are different bits of the mixed key, so that two keys of a shard are
 * taken for one about once in 2^32 lookups.
 */
#ifndef PENSTOCK_REMOVED_KEYS_H
#define PENSTOCK_REMOVED_KEYS_H

#include <stdlib.h>
#include <string.h>

#include "keys/key_table.h"

typedef struct {
    uint32_t *prints; /* 0: empty; NULL: no memory yet */
    size_t slots, size;
} RemovedKeys;

static inline uint32_t *removed_find(const RemovedKeys *removed, int shard_bits, uint64_t mixed) {
    uint32_t print = (uint32_t)mixed ? (uint32_t)mixed : 1;
    size_t slot = key_home(mixed, shard_bits, removed->slots);
    while (removed->prints[slot] && removed->prints[slot] != print)
        if (++slot == removed->slots) slot = 0;
    return &removed->prints[slot];
}

static inline int removed_has(const RemovedKeys *removed, int shard_bits, uint64_t mixed) {
    return removed->size && *removed_find(removed, shard_bits, mixed);
}

/* Make room for so many keys, once. Returns -1 if there is no memory. */
static inline int removed_reserve(RemovedKeys *removed, size_t num_keys) {
    if (removed->prints) return 0;
    removed->slots = (num_keys * 8 + 4) / 5 + 1;
    removed->prints = (uint32_t *)calloc(removed->slots, sizeof(uint32_t));
    return removed->prints ? 0 : -1;
}

/* Add a key to ``lately``; once that has ``most`` keys, it takes the place of ``before``. */
static inline void removed_add(RemovedKeys *lately, RemovedKeys *before, size_t most, int shard_bits, uint64_t mixed) {
    if (lately->size >= most) {
        RemovedKeys emptied = *before;
        *before = *lately;
        *lately = emptied;
        memset(lately->prints, 0, lately->slots * sizeof(uint32_t));
        lately->size = 0;
    }
    uint32_t *print = removed_find(lately, shard_bits, mixed);
    lately->size += !*print;
    *print = (uint32_t)mixed ? (uint32_t)mixed : 1;
}

static inline size_t removed_bytes_of_bits(const RemovedKeys *removed) { return (removed->slots + 7) / 8; }

/* Write the prints, slot by slot, and a bit for every slot, whether it has one. prints : room for size + 1 */
static inline void removed_save(const RemovedKeys *removed, uint8_t *bits, uint32_t *prints) {
    memset(bits, 0, removed_bytes_of_bits(removed));
    for (size_t slot = 0; slot < removed->slots; slot++) {
        int has = removed->prints[slot] != 0;
        *prints = removed->prints[slot];
        prints += has;
        bits[slot >> 3] |= (uint8_t)(has << (slot & 7));
    }
}

/* Fill empty slots with ``size`` prints. Returns -1 if the bits are not of so many. */
static inline int removed_restore(RemovedKeys *removed, const uint8_t *bits, const uint32_t *prints, size_t size) {
    for (size_t slot = 0; slot < removed->slots; slot++) {
        if (!(bits[slot >> 3] >> (slot & 7) & 1)) continue;
        if (removed->size == size) return -1;
        removed->prints[slot] = prints[removed->size++];
    }
    return removed->size == size ? 0 : -1;
}

#endif
