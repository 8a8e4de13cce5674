# id → dense index. A struct and free functions that need no GIL; the class owns the memory.
from libc.stdint cimport uint64_t

from ._types cimport id_t, index_t

cdef extern from *:
    """
    #define PENSTOCK_PREFETCH(address) __builtin_prefetch(address)
    """
    # A hint to fetch a cache line that will be needed a few turns of a loop later; it cannot fault.
    void prefetch "PENSTOCK_PREFETCH" (const void* address) noexcept nogil


cdef struct Slot:
    id_t key
    index_t index          # below the table's base: the slot is empty (no key is set apart: every int64 may be an id)


cdef struct Table:
    Slot* slots
    size_t capacity        # a power of two
    int shift              # 64 - log2(capacity)
    index_t base           # of the indices since the table was last cleared, which moves it: no slot is touched
    index_t num_ids


cdef inline size_t slot_of(const Table* table, id_t key) noexcept nogil:
    # Fibonacci hashing: the high bits of the product depend on all bits below them. The xor first
    # brings down the high half, so that ids which differ only there do not meet.
    cdef uint64_t x = <uint64_t>key
    x ^= x >> 32
    return <size_t>((x * <uint64_t>0x9E3779B97F4A7C15) >> table.shift)


cdef int table_init(Table* table, size_t num_ids) except -1 nogil
cdef void table_free(Table* table) noexcept nogil
cdef void table_clear(Table* table) noexcept nogil
cdef int table_reserve(Table* table, size_t num_ids) except -1 nogil
cdef index_t table_insert(Table* table, id_t key, bint* is_new) noexcept nogil


cdef class IdTable:
    cdef Table table
