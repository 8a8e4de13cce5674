"""id → dense index, by a hash table or by a direct map: one load where a table hashes and compares; and sets of ids."""

import numpy as np

from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport uint8_t, uint32_t

from ._types cimport id_t, index_t
from .buffer_pool cimport penstock_allocate_zeroed, penstock_release

cdef enum:
    CHUNK = 1024


cdef class IdTable:
    """Dense indices for ids, in order of first appearance.

    num_ids : how many to make room for at the start; the table grows beyond by doubling
    """

    def __cinit__(self, size_t num_ids=0):
        self.buckets.wide, self.buckets.isa = True, best_isa()
        self._make_room(num_ids)

    def __dealloc__(self):
        id_buckets_free(&self.buckets)
        PyMem_Free(self.ids)

    def __len__(self):
        return self.buckets.num_ids

    def insert(self, const id_t[::1] ids not None):  # IN
        """Give every id an index. ids : int64, shape (n,). Returns int64, shape (n,). Raises MemoryError."""
        cdef Py_ssize_t start, k, num_chunk, n = ids.shape[0]
        cdef uint32_t[CHUNK] slots
        out = np.empty(n, np.int64)
        cdef index_t[::1] indices = out
        for start in range(0, n, CHUNK):
            num_chunk = min(<Py_ssize_t>CHUNK, n - start)
            self._make_room(self.buckets.num_ids + num_chunk)
            with nogil:
                id_buckets_find(&self.buckets, &ids[start], num_chunk, self.ids, slots)
                for k in range(num_chunk):
                    indices[start + k] = slots[k] & ~<uint32_t>NEW_ID
        return out

    cdef int _make_room(self, size_t num_ids) except -1:
        """Make room for so many ids in all, so that finding them cannot fail."""
        cdef size_t room = self.room
        cdef void* grown
        if num_ids < room:
            return 0
        while room <= num_ids:
            room = max(<size_t>16, 2 * room)
        if num_ids > MOST_SLOTS:
            raise MemoryError(f"id table: at most {MOST_SLOTS} ids, got {num_ids}")
        grown = PyMem_Realloc(self.ids, room * sizeof(id_t))
        if grown == NULL:
            raise MemoryError(f"id table: cannot allocate {room * sizeof(id_t)} bytes for {room} ids")
        self.ids = <id_t*>grown
        if not id_buckets_reserve(&self.buckets, room, self.ids):
            raise MemoryError(f"id table: no memory for the buckets of {room} ids")
        self.room = room
        return 0


cdef enum:
    NEVER = 0       # the entry of an id that this run has not seen
    SEEN = 1        # after entries were renumbered: seen in this run, not held


cdef class IdMap:
    """size : the vocabulary. Large maps take memory only where ids occur."""

    def __cinit__(self, Py_ssize_t size):
        self.size, self.memory = size, IdBits(32 * size)
        self.entries = <uint32_t*>self.memory.bits
        self.base = self.run_base = SEEN + 1

    cdef int make_room(self, Py_ssize_t num_rows) except -1:
        """Renumber where num_rows indices from base on would not fit 32 bits: once in four billion distinct ids."""
        cdef Py_ssize_t i
        cdef uint32_t entry
        if num_rows <= <Py_ssize_t>(<uint32_t>-1) - <Py_ssize_t>self.base:
            return 0
        if num_rows > <Py_ssize_t>(<uint32_t>-1) - SEEN - 1:
            raise MemoryError(f"{num_rows} gradient rows between two openings: at most 4294967293 of one table")
        with nogil:
            for i in range(self.size):
                entry = self.entries[i]
                if entry >= self.base:
                    self.entries[i] = entry - self.base + SEEN + 1
                else:
                    self.entries[i] = SEEN if entry >= self.run_base else NEVER
        self.run_base, self.base = SEEN, SEEN + 1
        return 0

    def _give_out(self, Py_ssize_t num_indices):
        """For tests: as if so many indices had been given out before. Only while nothing is held."""
        self.base = self.run_base = <uint32_t>num_indices


cdef class IdBits:
    """A bit per id of a vocabulary that is hashed, all clear. Takes memory only where bits are set."""

    def __cinit__(self, Py_ssize_t size):
        self.num_bytes = size // 8 + 1
        self.bits = <uint8_t*>penstock_allocate_zeroed(self.num_bytes)
        if self.bits == NULL:
            raise MemoryError(f"cannot allocate {self.num_bytes} bytes for the ids of a table")

    def __dealloc__(self):
        if self.bits != NULL:
            penstock_release(self.bits, self.num_bytes)
