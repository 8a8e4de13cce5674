/* Reads without a lock: a seqlock per page of rows, of one counter per thread that writes, and one for a whole step.
 *
 * A counter is odd while its thread writes rows of the page, and a reader copies a row again whose page was odd or has
 * changed. A thread alone writes its counters, so that they need no locked instruction; marking a page twice is
 * harmless, so that a batch marks the page of each of its rows without looking for those it has marked.
 */
#ifndef PENSTOCK_PAGE_COUNTERS_H
#define PENSTOCK_PAGE_COUNTERS_H

#include <sched.h>
#include <stdint.h>

enum {
    LEAST_PAGE_BITS = 6, /* a page is 64 rows, */
    MOST_PAGES = 1024,   /* or more: 4 KB of counters stay in a thread's first-level cache, 16 KB cost three times that */
    ROWS_MARKED = 32,    /* rows whose pages are odd at a time: a reader waits for less than a microsecond */
    READ_SPINS = 256     /* before a reader gives its processor to the thread that it waits for */
};

/* The logarithm of the rows of a page. */
static inline int page_bits_of(int64_t num_rows) {
    int bits = LEAST_PAGE_BITS;
    while (((num_rows - 1) >> bits) >= MOST_PAGES) bits++;
    return bits;
}

/* Make the pages of rows odd; their rows are written afterwards. */
static inline void begin_pages(uint32_t *counters, int page_bits, const int64_t *rows, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t *counter = counters + (rows[i] >> page_bits);
        __atomic_store_n(counter, *counter | 1, __ATOMIC_RELAXED);
    }
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

/* Make them even, and other than before. */
static inline void end_pages(uint32_t *counters, int page_bits, const int64_t *rows, int64_t n) {
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int64_t i = 0; i < n; i++) {
        uint32_t *counter = counters + (rows[i] >> page_bits);
        __atomic_store_n(counter, (*counter + 1) & ~1u, __ATOMIC_RELAXED);
    }
}

/* What changes whenever rows of a page are written: the sum of its counters, times 2; odd while one of them is. */
static inline uint64_t page_version(const uint32_t *counters, int64_t num_threads, int64_t per_thread) {
    uint64_t sum = 0, odd = 0;
    for (int64_t thread = 0; thread < num_threads; thread++) {
        uint32_t counter = __atomic_load_n(counters + thread * per_thread, __ATOMIC_ACQUIRE);
        sum += counter;
        odd |= counter & 1;
    }
    return sum << 1 | odd;
}

static inline void end_copy(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

static inline void read_again(int times) {
    if (times >= READ_SPINS)
        sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else
        __builtin_ia32_pause();
#endif
}

/* Words that processes share. */
#define load_word(word) __atomic_load_n(word, __ATOMIC_ACQUIRE)
#define store_word(word, value) __atomic_store_n(word, value, __ATOMIC_RELEASE)
#define begin_word(word) \
    (__atomic_store_n(word, *(word) | 1, __ATOMIC_RELAXED), __atomic_thread_fence(__ATOMIC_RELEASE))
#define end_word(word) __atomic_store_n(word, (*(word) + 1) & ~(uint64_t)1, __ATOMIC_RELEASE)

#endif
