/* Threads on the rows of one frame: one publishes how many slots it has written, and others take turns at those rows. */
#ifndef PENSTOCK_PROGRESS_H
#define PENSTOCK_PROGRESS_H

#include <sched.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define ALL_DONE ((int64_t)1 << 62) /* added to a progress when there is no more */

enum {
    SPINS = 256,  /* ten to twenty microseconds, about as long as it takes to fall asleep and wake up */
    MOMENTS = 260, /* waits after which a thread looks for other work: the one waited for may have no processor */
    LOST_NS = 2000000 /* without a processor: another program has its share of it, not only an interrupt */
};

static inline int is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
static inline void set_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

static inline void publish(int64_t *progress, int64_t value) { __atomic_store_n(progress, value, __ATOMIC_RELEASE); }
static inline int64_t published(const int64_t *progress) { return __atomic_load_n(progress, __ATOMIC_ACQUIRE); }

static inline void spin(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Wait for the number-th time in a row: for rows, which another thread looks up or writes meanwhile at full speed. */
static inline void yield_a_moment(int number) {
    if (number < SPINS)
        spin();
    else
        sched_yield();
}

/* The same, for a thread that may have no processor. One that yields would keep its own, and a busy program would stay on
   the processor of the other. */
static inline void sleep_a_moment(int number) {
    if (number < SPINS)
        spin();
    else
        usleep(20);
}

typedef struct {
    int64_t all, used;
} ThreadTime;

static inline ThreadTime thread_time(void) {
    struct timespec all, used;
    clock_gettime(CLOCK_MONOTONIC, &all);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (ThreadTime){(int64_t)all.tv_sec * 1000000000 + all.tv_nsec, (int64_t)used.tv_sec * 1000000000 + used.tv_nsec};
}

/* Whether this thread has had no processor for a while, and for a third of the time at least, since then. */
static inline int lost_time_since(ThreadTime since) {
    ThreadTime now = thread_time();
    int64_t all = now.all - since.all, lost = all - (now.used - since.used);
    return lost > LOST_NS && 3 * lost > all;
}

/* Whether this thread may leave: not the last one of so many. */
static inline int leaves(int *num_threads) {
    int num = __atomic_load_n(num_threads, __ATOMIC_RELAXED);
    while (num > 1)
        if (__atomic_compare_exchange_n(num_threads, &num, num - 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 1;
    return 0;
}

static inline void enters(int *num_threads) { __atomic_fetch_add(num_threads, 1, __ATOMIC_RELAXED); }

/* Whether this thread is the first: for good, or until the flag is cleared. */
static inline int takes(int *flag) { return !__atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE); }

/* How many are left. The thread that counts the last one sees what all others did before. */
static inline int64_t count_down(int64_t *num_left) { return __atomic_sub_fetch(num_left, 1, __ATOMIC_ACQ_REL); }

/* The next number, from 0 on: of an item that this thread does, or of the thread. */
static inline int64_t take_number(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static inline void lock(int *flag) {
    for (int number = 0; !takes(flag); number++) sleep_a_moment(number);
}

static inline void unlock(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }

#endif
