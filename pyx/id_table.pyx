"""id → dense index in order of first appearance: open addressing, linear probing, grows, never deletes."""

import numpy as np

from ._types cimport id_t, index_t

cdef extern from "pages.h":
    void* penstock_allocate(size_t size) noexcept nogil
    void penstock_release(void* memory, size_t size) noexcept nogil


cdef size_t SMALLEST = 16


cdef size_t capacity_for(size_t num_ids) noexcept nogil:
    # At most half of the slots are full: an unsuccessful probe then looks at 2.5 of them on average.
    cdef size_t capacity = SMALLEST
    while capacity < 2 * num_ids:
        capacity *= 2
    return capacity


cdef int table_allocate(Table* table, size_t capacity) except -1 nogil:
    cdef Slot* slots = <Slot*>penstock_allocate(capacity * sizeof(Slot))
    cdef int bits = 0
    cdef size_t i
    if slots == NULL:
        raise MemoryError(f"id table: cannot allocate {capacity * sizeof(Slot)} bytes for {capacity} slots")
    while (<size_t>1 << bits) < capacity:
        bits += 1
    table.slots = slots
    table.capacity = table.reserved = capacity
    table.shift = 64 - bits
    table.base = table.num_ids = 0
    for i in range(capacity):
        slots[i].index = -1
    return 0


cdef int table_init(Table* table, size_t num_ids) except -1 nogil:
    return table_allocate(table, capacity_for(num_ids))


cdef void table_free(Table* table) noexcept nogil:
    if table.slots != NULL:
        penstock_release(table.slots, table.reserved * sizeof(Slot))
    table.slots = NULL


cdef void table_clear(Table* table) noexcept nogil:
    # 2**63 indices will not be given out. As few slots as the same number of ids needs: they stay in the caches.
    cdef size_t capacity = min(capacity_for(table.num_ids), table.reserved)
    table.base += table.num_ids
    table.num_ids = 0
    set_capacity(table, capacity)


cdef void set_capacity(Table* table, size_t capacity) noexcept nogil:
    table.capacity, table.shift = capacity, 64
    while capacity > 1:
        capacity //= 2
        table.shift -= 1


cdef void table_widen(Table* table, const id_t* ids, size_t num_more) noexcept nogil:
    """Use as many of the reserved slots as that many more ids need. ids : those that the table has, by index"""
    cdef index_t i
    cdef size_t at, capacity = min(capacity_for(table.num_ids + num_more), table.reserved)
    if capacity <= table.capacity:
        return
    set_capacity(table, capacity)
    table.base += table.num_ids  # no slot has an id now
    for i in range(table.num_ids):
        at = slot_of(table, ids[i])
        while table.slots[at].index >= table.base:
            at = (at + 1) & (capacity - 1)
        table.slots[at].key = ids[i]
        table.slots[at].index = table.base + i


cdef int table_reserve(Table* table, size_t num_ids) except -1 nogil:
    """Make room for num_ids in all, so that inserting up to there cannot fail."""
    cdef Table bigger
    cdef size_t i, at
    cdef size_t capacity = capacity_for(num_ids)
    if capacity <= table.reserved:
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
    penstock_release(table.slots, table.reserved * sizeof(Slot))
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
