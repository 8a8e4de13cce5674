# Hints to fetch a cache line early: to read it, to write it, and to read it from a function that does nothing else.
cdef extern from "prefetch.h" nogil:
    void prefetch "penstock_prefetch" (const void* address) noexcept
    void prefetch_write "penstock_prefetch_write" (const void* address) noexcept
    void prefetch_kept "penstock_prefetch_kept" (const void* address) noexcept
