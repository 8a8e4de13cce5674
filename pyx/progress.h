/* Threads on the rows of one frame: one publishes how many slots it has written, and others take turns at those rows. */
#ifndef PENSTOCK_PROGRESS_H
#define PENSTOCK_PROGRESS_H

#include <stdint.h>
#include <unistd.h>

#define ALL_DONE ((int64_t)1 << 62) /* added to a progress when there is no more */

enum {
    SPINS = 256,  /* ten to twenty microseconds, about as long as it takes to fall asleep and wake up */
    MOMENTS = 260 /* waits after which a thread looks for other work: the one waited for may have no processor */
};

static inline int is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
static inline void set_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

static inline void publish(int64_t *progress, int64_t value) { __atomic_store_n(progress, value, __ATOMIC_RELEASE); }
static inline int64_t published(const int64_t *progress) { return __atomic_load_n(progress, __ATOMIC_ACQUIRE); }

/* Wait for the number-th time in a row. A thread that waits long sleeps: one that yields keeps its processor where no
   other thread is assigned to it, and the thread that it waits for may share another processor with a busy program. */
static inline void wait_a_moment(int number) {
    if (number >= SPINS)
        usleep(20);
#if defined(__x86_64__) || defined(__i386__)
    else
        __builtin_ia32_pause();
#endif
}

/* Whether this thread is the first: for good, or until the flag is cleared. */
static inline int takes(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }

static inline void lock(int *flag) {
    for (int number = 0; !takes(flag); number++) wait_a_moment(number);
}

static inline void unlock(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }

#endif
