/* Open addressing over 16-byte entries: linear probing, multiply-shift, deletion by backward shift.
 *
 * Keys enter mixed: a bijection of 64 bits spreads them, so that the mixed key replaces the key everywhere, decides the
 * shard (its top bits) and the place in the shard (the bits below), and orders keys without ties.
 */
#ifndef PENSTOCK_KEY_TABLE_H
#define PENSTOCK_KEY_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t mixed;
    int32_t value; /* below 0: the entry is empty */
    uint32_t last;
} KeyEntry;

typedef struct { /* what a removal is decided by, and what it names */
    uint64_t mixed;
    uint32_t score;
    int32_t value;
} KeyRank;

static inline uint64_t key_mix(uint64_t key, uint64_t salt) {
    uint64_t x = key ^ salt;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline uint64_t key_unmix(uint64_t mixed, uint64_t salt) {
    uint64_t x = mixed ^ (mixed >> 31) ^ (mixed >> 62);
    x *= 0x319642b2d24d8ec3u;
    x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
    return (x ^ (x >> 30) ^ (x >> 60)) ^ salt;
}

/* shard_bits : of the top bits, which are the same for all keys of a table of entries */
static inline size_t key_home(uint64_t mixed, int shard_bits, size_t slots) {
    return (size_t)(((unsigned __int128)(mixed << shard_bits) * slots) >> 64);
}

/* The entry of a key, or the empty entry where it belongs. One entry at least must be empty. */
static inline KeyEntry *key_find_from(KeyEntry *entries, size_t slots, uint64_t mixed, size_t slot) {
    while (entries[slot].value >= 0 && entries[slot].mixed != mixed)
        if (++slot == slots) slot = 0;
    return &entries[slot];
}

static inline KeyEntry *key_find(KeyEntry *entries, size_t slots, int shard_bits, uint64_t mixed) {
    return key_find_from(entries, slots, mixed, key_home(mixed, shard_bits, slots));
}

static inline void key_clear(KeyEntry *entries, size_t slots) {
    for (size_t i = 0; i < slots; i++) entries[i].value = -1;
}

/* Empty an entry, and move up the entries behind it that probed past it. */
static inline void key_remove(KeyEntry *entries, size_t slots, int shard_bits, KeyEntry *entry) {
    size_t hole = (size_t)(entry - entries), slot = hole;
    for (;;) {
        if (++slot == slots) slot = 0;
        if (entries[slot].value < 0) break;
        size_t home = key_home(entries[slot].mixed, shard_bits, slots);
        size_t probed = slot >= home ? slot - home : slot + slots - home;
        size_t distance = slot >= hole ? slot - hole : slot + slots - hole;
        if (probed >= distance) {
            entries[hole] = entries[slot];
            hole = slot;
        }
    }
    entries[hole].value = -1;
}

static inline int rank_below(KeyRank a, KeyRank b) {
    return a.score != b.score ? a.score < b.score : a.mixed < b.mixed;
}

/* Sort n ranks by insertion: in linear time if few of them are far from their place. */
static inline void rank_nearly_sorted(KeyRank *ranks, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        KeyRank rank = ranks[i];
        int64_t slot = i;
        for (; slot > 0 && rank_below(rank, ranks[slot - 1]); slot--) ranks[slot] = ranks[slot - 1];
        ranks[slot] = rank;
    }
}

/* Bring the lowest ``count`` of n ranks to the front, in order: a quicksort that leaves out what lies behind them. */
static inline void rank_lowest(KeyRank *ranks, int64_t n, int64_t count) {
    while (n > 1 && count > 0) {
        if (n <= 16) {
            rank_nearly_sorted(ranks, n);
            return;
        }
        /* Mixed keys are as good as random: no order of arrival makes this slow. The pivot comes first: both parts then
         * have an element. */
        int64_t chosen = (int64_t)((ranks[0].mixed ^ ranks[n - 1].mixed) % (uint64_t)n), low = -1, high = n;
        KeyRank pivot = ranks[chosen];
        ranks[chosen] = ranks[0];
        ranks[0] = pivot;
        for (;;) {
            while (rank_below(ranks[++low], pivot)) {}
            while (rank_below(pivot, ranks[--high])) {}
            if (low >= high) break;
            KeyRank swapped = ranks[low];
            ranks[low] = ranks[high];
            ranks[high] = swapped;
        }
        int64_t left = high + 1;
        rank_lowest(ranks, left, count);
        ranks += left;
        n -= left;
        count -= left;
    }
}

#endif
