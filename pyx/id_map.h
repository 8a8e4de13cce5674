/* Ids → slots by a direct map: id_table.pxd says what an entry is. */
#ifndef PENSTOCK_ID_MAP_H
#define PENSTOCK_ID_MAP_H

#include <stdint.h>

enum {
    MAP_CHUNK = 1024,
    ENTRIES_AHEAD = 64 /* ids whose entry is asked for before it is needed */
};

/* slots[k]: of ids[k], marked where it is new; new ids are appended to held, and whether this run has not seen them to
   fresh, with room for one more than there are. n: at most MAP_CHUNK. Returns how many are held.

   search_first: IN whether to look at all entries before any is written, OUT whether it will pay for the next chunk: an
   entry that is held is then not written, but one that is not is visited twice. No branch on what an entry is: it cannot
   be predicted. */
static inline int64_t id_map_find(uint32_t *entries, uint32_t base, uint32_t run_base, const int64_t *ids, long n,
                                  int64_t *held, uint8_t *fresh, int64_t num_held, uint32_t *slots, int *search_first) {
    uint32_t missed[MAP_CHUNK];
    const int64_t before = num_held;
    long num_missed = 0;
    for (long k = 0; k < n && k < ENTRIES_AHEAD; k++) __builtin_prefetch(&entries[ids[k]], 1);
    if (*search_first) {
        for (long k = 0; k < n; k++) {
            uint32_t entry = entries[ids[k]];
            __builtin_prefetch(&entries[ids[k + ENTRIES_AHEAD < n ? k + ENTRIES_AHEAD : k]], 1);
            slots[k] = entry - base;
            missed[num_missed] = (uint32_t)k;
            num_missed += entry < base;
        }
    } else {
        for (; num_missed < n; num_missed++) missed[num_missed] = (uint32_t)num_missed;
    }
    for (long i = 0; i < num_missed; i++) {
        uint32_t k = missed[i], entry = entries[ids[k]], is_new = entry < base;
        uint32_t slot = is_new ? (uint32_t)num_held : entry - base;
        __builtin_prefetch(&entries[ids[missed[i + ENTRIES_AHEAD < num_missed ? i + ENTRIES_AHEAD : i]]], 1);
        held[num_held] = ids[k]; /* written whether new or not, one beyond the end */
        fresh[num_held] = entry < run_base;
        entries[ids[k]] = base + slot;
        slots[k] = slot | is_new << 31;
        num_held += is_new;
    }
    *search_first = (num_held - before) * 4 < n * 3;
    return num_held;
}

#endif
