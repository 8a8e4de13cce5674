/* Hints to fetch a cache line that will be needed a few turns of a loop later; they cannot fault. */
#ifndef PENSTOCK_PREFETCH_H
#define PENSTOCK_PREFETCH_H

#define penstock_prefetch(address) __builtin_prefetch(address)
#define penstock_prefetch_write(address) __builtin_prefetch(address, 1)
/* GCC takes a function that does nothing but prefetch for one without effects, and drops its calls; not with this. */
#define penstock_prefetch_kept(address) \
    do {                                \
        __builtin_prefetch(address);    \
        __asm__ volatile("");           \
    } while (0)

#endif
