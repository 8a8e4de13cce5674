"""The memory of a table's parts: blocks of a pool for all that grows with ids or with the rows of a frame.

What a frame may need at most is reserved before it enters, so that adding it cannot fail.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy, memset

from ._types cimport id_t, index_t
from .buffer_pool cimport Block, Pool
from .coalesce cimport Mark, Part, part_begin
from .id_table cimport MOST_SLOTS, Bucket, id_buckets_free, id_buckets_reserve


cdef class PartMemory:
    """Parts, and the blocks that their pointers look into."""

    def __cinit__(self, *_, **__):
        self._pool = Pool()
        self._ids, self._sums, self._first_seen, self._marks, self._rows, self._slots, self._picked = (
            [None] * MOST_PARTS for _ in range(7))

    def __dealloc__(self):
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            id_buckets_free(&self.parts[p].buckets)

    cdef Py_ssize_t held(self) noexcept:
        cdef Py_ssize_t p, n = 0
        for p in range(self.num_parts):
            n += self.parts[p].num_ids
        return n

    cdef Py_ssize_t distinct(self) noexcept:
        cdef Py_ssize_t p, n = 0
        for p in range(self.num_parts):
            n += self.parts[p].num_distinct
        return n

    cdef Py_ssize_t bytes_per_id(self) noexcept:
        return self.row_bytes + 9 + self.count * sizeof(Mark) + self.count_rows * sizeof(index_t)

    cdef Py_ssize_t num_bytes(self) noexcept:
        cdef Py_ssize_t p, buckets = 0
        for p in range(self.num_parts):
            buckets += self.parts[p].buckets.reserved
        return (self.held() * self.bytes_per_id() + buckets * sizeof(Bucket) + (self.map.memory.num_bytes if self.map is not None else 0)
                + self._pool.touched_bytes())

    cdef int set_parts(self, Py_ssize_t num_parts) except -1:
        """Have so many parts, a power of two. Only while nothing is held."""
        cdef Py_ssize_t p, distinct = self.distinct()
        if num_parts < 1 or num_parts & (num_parts - 1):
            raise ValueError(f"num_parts must be a power of two, got {num_parts}")
        while self.num_parts < num_parts:
            memset(&self.parts[self.num_parts], 0, sizeof(Part))
            self.parts[self.num_parts].buckets.isa = self.frame.isa
            self.parts[self.num_parts].buckets.wide = not 0 < self.vocabulary.size <= <id_t>1 << 32
            self.num_parts += 1
        while self.num_parts > num_parts:
            self.num_parts -= 1
            id_buckets_free(&self.parts[self.num_parts].buckets)
            for blocks in (self._ids, self._sums, self._first_seen, self._marks):
                blocks[self.num_parts] = None  # back to the pool
        for p in range(num_parts):
            self.parts[p].num_distinct = 0 if p else distinct
        return 0

    cdef int reserve(self, Py_ssize_t p, Py_ssize_t num_rows) except -1:
        """Room for as many new ids as there are rows, or as the vocabulary has, in all that grows with ids."""
        cdef Part* part = &self.parts[p]
        cdef Py_ssize_t room = part.num_ids + num_rows
        if self.vocabulary.size:
            room = min(room, <Py_ssize_t>self.vocabulary.size)
        if room > MOST_SLOTS:
            raise MemoryError(f"{room} ids between two openings: at most {MOST_SLOTS} of one table")
        # One more: a look-up in the map writes one beyond the end.
        self._sums[p] = self._grown(self._sums[p], part.num_ids, room, self.row_bytes)
        part.sums = (<Block>self._sums[p]).memory
        self._ids[p] = self._grown(self._ids[p], part.num_ids, room + 1, sizeof(id_t))
        part.ids = <id_t*>(<Block>self._ids[p]).memory
        self._first_seen[p] = self._grown(self._first_seen[p], part.num_ids, room + 1, 1)
        part.first_seen = <uint8_t*>(<Block>self._first_seen[p]).memory
        if self._marks[p] is not None:
            self._marks[p] = self._grown(self._marks[p], part.num_ids, room, sizeof(Mark))
            part.marks = <Mark*>(<Block>self._marks[p]).memory
        if self.count_rows:
            self._rows[p] = self._grown(self._rows[p], part.num_ids, room, sizeof(index_t))
            part.rows = <index_t*>(<Block>self._rows[p]).memory
        if self.map is None and not id_buckets_reserve(&part.buckets, room, part.ids):
            raise MemoryError(f"no memory for the index of {room} ids")
        return 0

    cdef int reserve_slots(self, Py_ssize_t p, Py_ssize_t num_rows) except -1:
        """Room for the slots of all rows of a frame, and for their numbers where there are several parts."""
        cdef Block block = self._pool.take(num_rows * sizeof(uint32_t))
        cdef Part* part = &self.parts[p]
        if num_rows > MOST_SLOTS:
            raise MemoryError(f"{num_rows} rows in a frame: at most {MOST_SLOTS} of one table")
        self._slots[p], part.slots, block.used = block, <uint32_t*>block.memory, num_rows * sizeof(uint32_t)
        if self.num_parts > 1:
            block = self._pool.take(num_rows * sizeof(uint32_t))
            self._picked[p], part.picked, block.used = block, <uint32_t*>block.memory, num_rows * sizeof(uint32_t)
        part_begin(part)
        return 0

    cdef int release_slots(self) except -1:
        """The frame is in, or will not come."""
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            self._slots[p], self._picked[p], self.parts[p].picked = None, None, NULL
        return 0

    cdef int start_marks(self, Py_ssize_t p) except -1:
        """From the second frame on every id has a mark; so far each occurred in the first one."""
        cdef Py_ssize_t i
        cdef Part* part = &self.parts[p]
        if self._marks[p] is not None:
            return 0
        self._marks[p] = self._pool.take((<Block>self._ids[p]).size // sizeof(id_t) * sizeof(Mark))
        part.marks = <Mark*>(<Block>self._marks[p]).memory
        for i in range(part.num_ids):
            part.marks[i].frame, part.marks[i].count = self.first_frame, 1
        return 0

    cdef Block _grown(self, block, Py_ssize_t used, Py_ssize_t room, Py_ssize_t width):
        """A block with room for so many entries of width bytes, the first used of them kept."""
        cdef Block bigger
        if block is not None and (<Block>block).size >= room * width:
            return block
        bigger = self._pool.take(room * width)
        if block is not None:
            memcpy(bigger.memory, (<Block>block).memory, used * width)
        return bigger

    def _give_out(self, Py_ssize_t num_slots):
        """For tests: as if so many slots had been given out before. Only while nothing is held."""
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            self.parts[p].buckets.base = <uint32_t>num_slots
