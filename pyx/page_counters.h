/* Reads without a lock: a seqlock per page of rows and thread that writes, and one for a whole step.
 *
 * A thread numbers its batches of rows. Before it writes the rows of a batch, it stores the number at the page of each of
 * them; afterwards, as its last complete batch. A page is being written while its number is larger than that. A reader
 * copies a row again whose page was being written, or has another number after the copy. A thread alone writes its
 * numbers, so that they need no locked instruction, and a page that a batch marks twice needs no care.
 */
#ifndef PENSTOCK_PAGE_COUNTERS_H
#define PENSTOCK_PAGE_COUNTERS_H

#include <stdint.h>

enum {
    LEAST_PAGE_BITS = 6, /* a page is 64 rows, */
    MOST_PAGES = 256,    /* or more: 2 KB of numbers stay in a thread's first-level cache next to the rows */
    PAGES_BEGIN = 8,     /* in the numbers of a thread: the first is that of its last complete batch */
    MOST_WRITERS = 1025, /* threads that have numbers */
    ROWS_MARKED = 32     /* of a batch: a reader waits for less than a microsecond */
};

/* The logarithm of the rows of a page. */
static inline int page_bits_of(int64_t num_rows) {
    int bits = LEAST_PAGE_BITS;
    while (((num_rows - 1) >> bits) >= MOST_PAGES) bits++;
    return bits;
}

/* The next batch of a thread begins; its rows are written afterwards. */
static inline void begin_batch(uint64_t *numbers, int64_t first_page, int page_bits, const int64_t *rows, int64_t n) {
    uint64_t batch = *numbers + 1, *pages = numbers + PAGES_BEGIN + first_page;
    for (int64_t i = 0; i < n; i++) __atomic_store_n(pages + (rows[i] >> page_bits), batch, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

static inline void end_batch(uint64_t *numbers) { __atomic_store_n(numbers, *numbers + 1, __ATOMIC_RELEASE); }

/* What changes whenever rows of a page are written, the sum of its numbers; BEING_WRITTEN while they are.
   complete : the last complete batch of each thread, as far as it was read: its line changes with every batch */
#define BEING_WRITTEN UINT64_MAX
static inline uint64_t page_version(const uint64_t *numbers, int64_t page, int64_t num_threads, int64_t per_thread,
                                    uint64_t *complete) {
    uint64_t sum = 0;
    for (int64_t thread = 0; thread < num_threads; thread++, numbers += per_thread) {
        uint64_t batch = __atomic_load_n(numbers + PAGES_BEGIN + page, __ATOMIC_ACQUIRE);
        if (batch > complete[thread]) {
            complete[thread] = __atomic_load_n(numbers, __ATOMIC_ACQUIRE);
            if (batch > complete[thread]) return BEING_WRITTEN;
        }
        sum += batch;
    }
    return sum;
}

static inline void end_copy(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

/* Words that processes share. */
#define load_word(word) __atomic_load_n(word, __ATOMIC_ACQUIRE)
#define store_word(word, value) __atomic_store_n(word, value, __ATOMIC_RELEASE)
#define begin_word(word) \
    (__atomic_store_n(word, *(word) | 1, __ATOMIC_RELAXED), __atomic_thread_fence(__ATOMIC_RELEASE))
#define end_word(word) __atomic_store_n(word, (*(word) + 1) & ~(uint64_t)1, __ATOMIC_RELEASE)

/* The words of all tables (StepWords): whether a step runs, the last step, the last durable one, and a state. */
enum { NUM_WORDS = 8 };
static inline void end_step(uint64_t *words, uint64_t step) {
    store_word(words + 1, step);
    end_word(words);
}

#endif
