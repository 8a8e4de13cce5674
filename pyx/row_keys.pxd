# Which key has which row, in memory that other processes read without a lock.
from libc.stdint cimport int64_t, uint64_t

from .page_counters cimport load_word

cdef extern from "keys/key_table.h" nogil:
    uint64_t key_mix(uint64_t key, uint64_t salt)
    size_t key_home(uint64_t mixed, int shard_bits, size_t slots)

cdef enum:
    HEAD_WORDS = 8      # the clock, and the rest of its cache line
    EMPTY = 0
    REMOVED = 1
    FIRST_ROW = 2       # added to a row


cdef struct KeySlot:
    uint64_t key
    uint64_t state      # EMPTY, REMOVED, or FIRST_ROW + row


cdef struct KeySlots:
    uint64_t* clock
    KeySlot* slots
    uint64_t* last      # of every row, the clock when its key occurred last
    int64_t num_slots, capacity
    int64_t expire_after    # below 0: never
    uint64_t salt


cdef inline size_t next_slot(const KeySlots* keys, size_t slot) noexcept nogil:
    return slot + 1 if slot + 1 < <size_t>keys.num_slots else 0


cdef inline const KeySlot* find_key(const KeySlots* keys, uint64_t key, int64_t* row) noexcept nogil:
    """The slot of a key, and its row; NULL: it has none."""
    cdef size_t slot = key_home(key_mix(key, keys.salt), 0, <size_t>keys.num_slots)
    cdef int64_t i
    cdef uint64_t state
    for i in range(keys.num_slots):  # there is an empty slot, but in damaged memory
        state = load_word(&keys.slots[slot].state)
        if state == EMPTY:
            return NULL
        # The state first: a slot gets another key while it has no row.
        if state != REMOVED and load_word(&keys.slots[slot].key) == key:
            row[0] = <int64_t>(state - FIRST_ROW)
            return &keys.slots[slot]
        slot = next_slot(keys, slot)
    return NULL


cdef class RowKeys:
    cdef KeySlots keys
    cdef object memory
    cdef int _check_writable(self) except -1
