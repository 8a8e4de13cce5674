/* Two threads on one part: one publishes its progress, and the other follows. */
#ifndef PENSTOCK_PROGRESS_H
#define PENSTOCK_PROGRESS_H

#include <sched.h>
#include <stdint.h>

#define ALL_DONE ((int64_t)1 << 62) /* added to a progress when there is no more */

enum { SPINS = 4096 }; /* tens of microseconds; the thread waited for may have no processor just now */

static inline int is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED); }
static inline void set_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

static inline void publish(int64_t *progress, int64_t value) { __atomic_store_n(progress, value, __ATOMIC_RELEASE); }

/* The progress, once it is as wanted or final; -1 where stop is set first. */
static inline int64_t wait_for(int64_t *progress, int64_t wanted, const int *stop) {
    for (int spins = 0;; spins++) {
        int64_t now = __atomic_load_n(progress, __ATOMIC_ACQUIRE);
        if (now >= wanted) return now;
        if (is_set(stop)) return -1;
        if (spins >= SPINS)
            sched_yield();
#if defined(__x86_64__) || defined(__i386__)
        else
            __builtin_ia32_pause();
#endif
    }
}

#endif
