/* Memory from the system: aligned, and in huge pages where it is large. */
#ifndef PENSTOCK_PAGES_H
#define PENSTOCK_PAGES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PENSTOCK_HUGE ((size_t)1 << 21)

/* Huge pages for the whole ones inside untouched memory: rows are accessed in no order, and each would cost a TLB miss.
   Where the kernel has no such pages nothing changes. */
static inline void penstock_ask_for_huge_pages(void *memory, size_t size) {
#ifdef MADV_HUGEPAGE
    uintptr_t first = ((uintptr_t)memory + PENSTOCK_HUGE - 1) & ~(uintptr_t)(PENSTOCK_HUGE - 1);
    uintptr_t last = ((uintptr_t)memory + size) & ~(uintptr_t)(PENSTOCK_HUGE - 1);
    if (last > first)
        madvise((void *)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}

/* Small: from the heap. Large: mapped, so that what is never written takes no memory. */
static inline void *penstock_allocate(size_t size) {
    void *memory = NULL;
    if (size < PENSTOCK_HUGE)
        return posix_memalign(&memory, 64, size) ? NULL : memory;
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS
#ifdef MAP_NORESERVE
                  | MAP_NORESERVE
#endif
                  , -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    penstock_ask_for_huge_pages(memory, size);
    return memory;
}

/* The same, zeroed. Mapped pages are zero already, and are not touched before they are used. */
static inline void *penstock_allocate_zeroed(size_t size) {
    void *memory = penstock_allocate(size);
    if (memory && size < PENSTOCK_HUGE)
        memset(memory, 0, size);
    return memory;
}

static inline void penstock_release(void *memory, size_t size) {
    if (size < PENSTOCK_HUGE)
        free(memory);
    else
        munmap(memory, size);
}

#endif
