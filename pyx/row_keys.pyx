"""Which key of a dynamic table has which row: a copy of its directory for readers without a lock, also other processes.

Open addressing with linear probing. A key never moves: what is removed leaves a mark, which the next new key of its
probes takes, so that a reader finds every key that has a row all along. There is one writer.

A row that passes to another key is removed here before it is written, and gets its new key afterwards: a key that has
its row at any time between two equal versions of the row's page is the key of what was copied between them.
"""

import numpy as np

from libc.stdint cimport int64_t, uint64_t

from ._types cimport id_t
from .page_counters cimport store_word


def num_words(int64_t capacity):
    """Words of 64 bits that the keys of so many rows take: three slots per row, and the clock of each."""
    return HEAD_WORDS + 2 * slots_of(capacity) + capacity


cdef int64_t slots_of(int64_t capacity) noexcept:
    return 3 * capacity + 1


cdef class RowKeys:
    """The rows of keys, in ``memory``: uint64 (num_words(capacity),), of zeros or as another one left it.

    salt : of the hash; expire_after : a key is absent once the clock is further than this from its ``last``; -1: never
    """

    def __init__(self, memory not None, int64_t capacity, uint64_t salt=0, int64_t expire_after=-1):
        cdef const uint64_t[::1] words = memory
        if capacity < 1 or words.shape[0] < num_words(capacity):
            raise ValueError(f"expected {num_words(capacity)} words for {capacity} rows, got {words.shape[0]}")
        self.memory = memory
        self.keys.clock = <uint64_t*>&words[0]
        self.keys.num_slots, self.keys.capacity = slots_of(capacity), capacity
        self.keys.slots = <KeySlot*>(self.keys.clock + HEAD_WORDS)
        self.keys.last = self.keys.clock + HEAD_WORDS + 2 * self.keys.num_slots
        self.keys.salt, self.keys.expire_after = salt, expire_after

    def remove(self, const id_t[::1] keys not None):
        """Remove keys, before their rows are written for others. Keys without a row are skipped."""
        self._check_writable()
        cdef Py_ssize_t i
        with nogil:
            for i in range(keys.shape[0]):
                remove(&self.keys, <uint64_t>keys[i])

    def insert(self, const id_t[::1] keys not None, const id_t[::1] rows not None):
        """Give rows to keys that have none, after the rows were written."""
        self._check_writable()
        cdef Py_ssize_t i
        if keys.shape[0] != rows.shape[0]:
            raise ValueError(f"expected {keys.shape[0]} rows for as many keys, got {rows.shape[0]}")
        for i in range(rows.shape[0]):
            if not 0 <= rows[i] < self.keys.capacity:
                raise ValueError(f"expected 0 <= row < {self.keys.capacity}, got {rows[i]}")
        with nogil:
            for i in range(keys.shape[0]):
                if not insert(&self.keys, <uint64_t>keys[i], <uint64_t>rows[i] + FIRST_ROW):
                    with gil:
                        raise ValueError(f"more than {self.keys.capacity} keys")

    def stamp(self, const id_t[::1] rows not None, clocks):
        """Set when the keys of rows occurred last. clocks : int64 (n,), or one for all; rows below 0 are skipped"""
        self._check_writable()
        cdef const id_t[::1] clock = np.ascontiguousarray(np.broadcast_to(clocks, rows.shape[0]), np.int64)
        cdef Py_ssize_t i
        with nogil:
            for i in range(rows.shape[0]):
                if 0 <= rows[i] < self.keys.capacity:
                    store_word(&self.keys.last[rows[i]], <uint64_t>clock[i])

    def set_clock(self, int64_t clock):
        """Set the clock that ``expire_after`` is counted against."""
        self._check_writable()
        store_word(self.keys.clock, <uint64_t>clock)

    def rows(self, const id_t[::1] keys not None):
        """Return the row of every key, expired or not, int64 (n,), -1: it has none."""
        cdef Py_ssize_t i
        cdef int64_t row
        out = np.empty(keys.shape[0], np.int64)
        cdef int64_t[::1] key_rows = out
        with nogil:
            for i in range(keys.shape[0]):
                row = -1
                find_key(&self.keys, <uint64_t>keys[i], &row)
                key_rows[i] = row
        return out

    def items(self):
        """Return all keys and their rows, int64 (n,) each, in no order."""
        slots = np.asarray(self.memory).view(np.uint64)[HEAD_WORDS : HEAD_WORDS + 2 * self.keys.num_slots].reshape(-1, 2)
        used = slots[slots[:, 1] >= FIRST_ROW]
        return used[:, 0].view(np.int64).copy(), (used[:, 1] - FIRST_ROW).astype(np.int64)

    cdef int _check_writable(self) except -1:
        if not self.memory.flags.writeable:
            raise ValueError("the keys are of another writer")
        return 0


cdef bint insert(const KeySlots* keys, uint64_t key, uint64_t state) noexcept nogil:
    """Take the first slot of the key's probes that has no row. Returns whether there is one."""
    cdef size_t slot = key_home(key_mix(key, keys.salt), 0, <size_t>keys.num_slots)
    cdef int64_t i
    for i in range(keys.num_slots):
        if keys.slots[slot].state <= REMOVED:
            store_word(&keys.slots[slot].key, key)
            store_word(&keys.slots[slot].state, state)
            return True
        slot = next_slot(keys, slot)
    return False


cdef void remove(const KeySlots* keys, uint64_t key) noexcept nogil:
    cdef int64_t row
    cdef const KeySlot* entry = find_key(keys, key, &row)
    cdef size_t slot
    if entry == NULL:
        return
    slot = <size_t>(entry - keys.slots)
    store_word(&keys.slots[slot].state, REMOVED)
    # No key has probed past marks before an empty slot: they are empty too.
    if keys.slots[next_slot(keys, slot)].state == EMPTY:
        while keys.slots[slot].state == REMOVED:
            store_word(&keys.slots[slot].state, EMPTY)
            slot = slot - 1 if slot else <size_t>keys.num_slots - 1
