"""id → dense index in order of first appearance: open addressing, linear probing, grows, never deletes."""

import numpy as np

from libc.stdlib cimport free, malloc

from ._types cimport id_t, index_t


cdef size_t SMALLEST = 16


cdef size_t capacity_for(size_t num_ids) noexcept nogil:
    # At most half of the slots are full: an unsuccessful probe then looks at 2.5 of them on average.
    cdef size_t capacity = SMALLEST
    while capacity < 2 * num_ids:
        capacity *= 2
    return capacity


cdef int table_allocate(Table* table, size_t capacity) except -1 nogil:
    cdef Slot* slots = <Slot*>malloc(capacity * sizeof(Slot))
    cdef int bits = 0
    cdef size_t i
    if slots == NULL:
        raise MemoryError(f"id table: cannot allocate {capacity * sizeof(Slot)} bytes for {capacity} slots")
    while (<size_t>1 << bits) < capacity:
        bits += 1
    table.slots = slots
    table.capacity = capacity
    table.shift = 64 - bits
    table.base = table.num_ids = 0
    for i in range(capacity):
        slots[i].index = -1
    return 0


cdef int table_init(Table* table, size_t num_ids) except -1 nogil:
    return table_allocate(table, capacity_for(num_ids))


cdef void table_free(Table* table) noexcept nogil:
    free(table.slots)
    table.slots = NULL


cdef void table_clear(Table* table) noexcept nogil:
    # 2**63 indices will not be given out.
    table.base += table.num_ids
    table.num_ids = 0


cdef int table_reserve(Table* table, size_t num_ids) except -1 nogil:
    """Make room for num_ids in all, so that inserting up to there cannot fail."""
    cdef Table bigger
    cdef size_t i, at
    cdef size_t capacity = capacity_for(num_ids)
    if capacity <= table.capacity:
        return 0
    table_allocate(&bigger, capacity)
    for i in range(table.capacity):
        if table.slots[i].index >= table.base:
            at = slot_of(&bigger, table.slots[i].key)
            while bigger.slots[at].index >= 0:
                at = (at + 1) & (capacity - 1)
            bigger.slots[at] = table.slots[i]
            bigger.slots[at].index -= table.base
    bigger.num_ids = table.num_ids
    free(table.slots)
    table[0] = bigger
    return 0


cdef index_t table_insert(Table* table, id_t key, bint* is_new) noexcept nogil:
    """The index of key, given out now if it has none. Room must have been reserved."""
    cdef size_t at = slot_of(table, key)
    while table.slots[at].index >= table.base:
        if table.slots[at].key == key:
            is_new[0] = False
            return table.slots[at].index - table.base
        at = (at + 1) & (table.capacity - 1)
    table.slots[at].key = key
    table.slots[at].index = table.base + table.num_ids
    table.num_ids += 1
    is_new[0] = True
    return table.slots[at].index - table.base


cdef class IdTable:
    """Dense indices for ids, in order of first appearance.

    num_ids : how many to make room for at the start; the table grows beyond by doubling
    """

    def __cinit__(self, size_t num_ids=0):
        table_init(&self.table, num_ids)

    def __dealloc__(self):
        table_free(&self.table)

    def __len__(self):
        return self.table.num_ids

    def insert(self, const id_t[::1] ids not None):  # IN
        """Give every id an index. ids : int64, shape (n,). Returns int64, shape (n,)."""
        cdef Py_ssize_t i, n = ids.shape[0]
        cdef bint is_new
        out = np.empty(n, np.int64)
        cdef index_t[::1] indices = out
        with nogil:
            for i in range(n):
                # Grown by what is there, not by what might come: a batch may hold few distinct ids.
                if <size_t>(2 * (self.table.num_ids + 1)) > self.table.capacity:
                    table_reserve(&self.table, self.table.capacity)
                indices[i] = table_insert(&self.table, ids[i], &is_new)
        return out
