# Reads without a lock: page_counters.h.
from libc.stdint cimport int64_t, uint64_t

cdef extern from "page_counters.h" nogil:
    enum:
        PAGES_BEGIN
        MOST_WRITERS
        ROWS_MARKED
        NUM_WORDS
    int page_bits_of(int64_t num_rows)
    void begin_batch(uint64_t* counters, int64_t first_page, int page_bits, const int64_t* rows, int64_t n)
    void end_batch(uint64_t* counters)
    uint64_t BEING_WRITTEN
    uint64_t page_version(const uint64_t* counters, int64_t page, int64_t num_threads, int64_t per_thread,
                          uint64_t* complete)
    void end_copy()
    uint64_t load_word(const uint64_t* word)
    void store_word(uint64_t* word, uint64_t value)
    void begin_word(uint64_t* word)
    void end_step(uint64_t* words, uint64_t step)
