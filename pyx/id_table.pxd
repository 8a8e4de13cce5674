# id → dense index. A struct and free functions that need no GIL; the class owns the memory.
from ._types cimport id_t, index_t


cdef struct Slot:
    id_t key
    index_t index          # -1: the slot is empty (no key value is set apart: every int64 may be an id)


cdef struct Table:
    Slot* slots
    size_t capacity        # a power of two
    int shift              # 64 - log2(capacity)
    index_t num_ids


cdef int table_init(Table* table, size_t num_ids) except -1 nogil
cdef void table_free(Table* table) noexcept nogil
cdef void table_clear(Table* table) noexcept nogil
cdef int table_reserve(Table* table, size_t num_ids) except -1 nogil
cdef index_t table_insert(Table* table, id_t key, bint* is_new) noexcept nogil
cdef index_t table_find(const Table* table, id_t key) noexcept nogil


cdef class IdTable:
    cdef Table table
