"""id → dense index by a direct map: one load where a hash table hashes, probes and compares; and sets of ids."""

from libc.stdint cimport uint8_t, uint32_t

from .buffer_pool cimport penstock_allocate_zeroed, penstock_release

cdef enum:
    NEVER = 0       # the entry of an id that this run has not seen
    SEEN = 1        # after entries were renumbered: seen in this run, not held


cdef class IdMap:
    """size : the vocabulary. Large maps take memory only where ids occur."""

    def __cinit__(self, Py_ssize_t size):
        self.size = size
        self.num_bytes = max(size, 1) * sizeof(uint32_t)
        self.entries = <uint32_t*>penstock_allocate_zeroed(self.num_bytes)
        if self.entries == NULL:
            raise MemoryError(f"cannot allocate {self.num_bytes} bytes for the index of {size} ids")
        self.base = self.run_base = SEEN + 1

    def __dealloc__(self):
        if self.entries != NULL:
            penstock_release(self.entries, self.num_bytes)

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
            raise MemoryError(f"cannot allocate {self.num_bytes} bytes to count distinct ids")

    def __dealloc__(self):
        if self.bits != NULL:
            penstock_release(self.bits, self.num_bytes)
