"""What an opening of the gate does to a directory: decided in full before anything changes, then committed or dropped."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.directory cimport Directory
from penstock.pyx.keys.key_lookup cimport (
    count_chunk, deal_chunk, find_absent, find_chunk, list_chunk, place_chunks, take_back,
)
from penstock.pyx.keys.shard_decisions cimport (
    ADMITTED, CHUNK, AbsentKey, Decision, Opening, change, decide, num_chunks,
)
from penstock.pyx.keys.key_shards cimport MAX_CLOCK, Shard, key_unmix
from penstock.pyx.progress cimport set_flag, take_number

ctypedef int (*Work)(const Opening* opening, Py_ssize_t item) noexcept nogil

cdef enum:
    MOST_TASKS = 64
    KEYS_PER_SHARD = 64     # at least, to partition all keys before they are found

EXPIRED, EVICTED = 0, 1


cdef class Plan:
    """One opening of one directory.

    keys : int64 (n,), distinct; rows, frames : int64 (n,), the occurrences of each; None: 1
    clock : of this opening; step : its number, which decides about sweeps and chance
    admit_all : without filter, chance and sweep, for loads
    run : called with a list of callables, calls each on some thread, and returns when all have returned; None: the
        caller's thread alone

    key_rows : int64 (n,), the row of every key after the commit, -1: none
    num_admitted, num_expired, num_evicted, num_rejected : keys of this opening

    Whatever else is done with the directory before ``commit`` cancels the plan. Raises MemoryError or ValueError;
    nothing has changed then.
    """

    cdef Directory directory
    cdef readonly object keys, key_rows
    cdef readonly Py_ssize_t num_admitted, num_expired, num_evicted, num_rejected
    cdef Opening opening
    cdef object arrays, run     # arrays: those that the opening points into
    cdef int64_t epoch
    cdef bint open, decided
    cdef Work work
    cdef int64_t next
    cdef Py_ssize_t num_items, num_shards, num_absent
    cdef int failed

    def __cinit__(self, Directory directory not None, keys, rows=None, frames=None, *, int64_t clock, int64_t step,
                  bint admit_all=False, run=None):
        cdef Opening* opening = &self.opening
        cdef int64_t forget_after = directory.shards.policy.forget_after
        if not 0 <= clock <= MAX_CLOCK or step < 0:
            raise ValueError(f"expected a step of at least 0 and a clock from 0 to {MAX_CLOCK}, got step {step} and clock "
                             f"{clock}")
        directory.settle()
        self.directory, self.run, self.arrays, self.num_shards = directory, run, [], directory.shards.num_shards
        opening.shards, opening.clock, opening.step, opening.admit_all = &directory.shards, clock, step, admit_all
        self.point_to(keys, rows, frames)
        self.epoch, opening.generation = directory.shards.epoch, directory.shards.generation
        if forget_after > 0 and not admit_all:
            self.epoch = step // forget_after
            opening.generation += max(<int64_t>0, min(<int64_t>2, self.epoch - directory.shards.epoch))
        self.open, directory.plan = True, self
        try:
            self.find()
            self.mark_touched()
            self.decided = True
            self.each(decide, self.num_shards, self.num_absent)
            self.unmark_touched()
            if self.failed:
                raise MemoryError("cannot allocate the decisions of a plan")
        except BaseException:
            self.cancel()
            raise
        self.add_up()

    def __dealloc__(self):
        cdef Py_ssize_t s
        if self.opening.each != NULL:
            for s in range(self.num_shards):  # the collector may have cleared ``directory``
                free(self.opening.each[s].removed)
            free(self.opening.each)

    # ---- results

    @property
    def all_have_rows(self):
        """Whether every key has a row after the commit."""
        return self.num_admitted == self.num_absent

    @property
    def fresh(self):
        """Positions in ``keys`` of the keys that get a new row: int32, ascending."""
        cdef Py_ssize_t s, j, n = 0
        out = np.empty(self.num_admitted, np.int32)
        cdef int32_t[::1] positions = out
        for s in range(self.num_shards):
            for j in range(self.opening.first[s], self.opening.last[s]):
                if self.opening.fate[j] == ADMITTED:
                    positions[n] = self.opening.absent_keys[j].position
                    n += 1
        out.sort()
        return out

    def removed(self):
        """Return the removed keys as arrays: keys int64, why uint8 (EXPIRED, EVICTED); shard by shard, expired keys by
        mixed key, then evicted ones in the order of their eviction."""
        cdef Py_ssize_t s, i, j = 0, n = self.num_expired + self.num_evicted
        cdef Decision* decision
        keys, whys = np.empty(n, np.int64), np.empty(n, np.uint8)
        cdef int64_t[::1] key = keys
        cdef uint8_t[::1] why = whys
        for s in range(self.directory.shards.num_shards):
            decision = &self.opening.each[s]
            for i in range(decision.num_expired + decision.num_evicted):
                why[j] = i >= decision.num_expired
                key[j] = <int64_t>key_unmix(decision.removed[i].mixed, self.directory.shards.salt)
                j += 1
        return keys, whys

    @property
    def fullest(self):
        """Of the shard that rejects the most keys: its keys and its rows."""
        cdef Py_ssize_t s, most = 0
        cdef Shard* shard
        for s in range(self.num_shards):
            if self.opening.each[s].num_rejected > self.opening.each[most].num_rejected:
                most = s
        shard = &self.opening.shards.each[most]
        return shard.num_rows - shard.num_free, shard.num_rows

    # ---- the end of a plan

    def commit(self):
        """Carry the plan out. If ``run`` raises, some shards may have changed, and the directory must not be used again."""
        cdef Directory directory = self.directory
        cdef Py_ssize_t s
        if not self.open:
            raise ValueError("the plan was committed or cancelled before")
        self.each(change, self.num_shards, self.num_absent)
        if directory.shards.counts != NULL:
            self.each(count_chunk, num_chunks(&self.opening), self.opening.num_keys)
        directory.shards.clock = self.opening.clock
        directory.shards.newest = max(directory.shards.newest, self.opening.clock)
        directory.shards.epoch, directory.shards.generation = self.epoch, self.opening.generation
        directory.shards.mostly_new = 2 * self.num_absent > self.opening.num_keys
        directory.counts.admitted += self.num_admitted
        directory.counts.expired += self.num_expired
        directory.counts.evicted += self.num_evicted
        directory.counts.rejected += self.num_rejected
        for s in range(self.num_shards):
            directory.counts.returned += self.opening.each[s].num_returned
            directory.counts.unadmitted_rows += self.opening.each[s].unadmitted_rows
        self.open, directory.plan = False, None

    cpdef cancel(self):
        """Drop the plan: the directory is as before it."""
        if self.open:
            self.unmark_touched()
            take_back(&self.opening, self.decided)
            self.open, self.directory.plan = False, None

    # ---- tasks

    cdef int each(self, Work work, Py_ssize_t num_items, Py_ssize_t num_keys) except -1:
        """Do the work for every item, a chunk or a shard, on the threads of ``run``; for few keys on the caller's."""
        self.work, self.num_items, self.next = work, num_items, 0
        self.opening.alone = self.run is None or num_keys < CHUNK
        if not self.opening.alone:
            try:
                self.run([self._items] * MOST_TASKS)
            except MemoryError:
                pass  # a thread found none for its call, before it took an item: this one does the rest
        self._items()
        return 0

    def _items(self):
        cdef Py_ssize_t item
        with nogil:
            item = take_number(&self.next)
            while item < self.num_items:
                if self.work(&self.opening, item) < 0:
                    set_flag(&self.failed)
                item = take_number(&self.next)
        return True

    # ---- inside

    cdef int point_to(self, keys, rows, frames) except -1:
        """Allocate what the number of keys decides, and point the opening to it."""
        cdef Opening* opening = &self.opening
        cdef const id_t[::1] key = keys
        cdef const int64_t[::1] counts
        cdef int64_t[::1] key_rows
        cdef Py_ssize_t chunk, n = key.shape[0]
        if n >= 2**31:
            raise ValueError(f"expected less than {2**31} keys, got {n}")
        opening.num_keys = n
        self.keys, self.key_rows = keys, self.directory.array(np.int64, n)
        if n:
            opening.keys = &key[0]
            for number, occurrences in enumerate((rows, frames)):
                if occurrences is None:
                    continue
                counts = occurrences
                if counts.shape[0] != n:
                    raise ValueError(f"expected {n} counts, got {counts.shape[0]}")
                self.arrays.append(occurrences)
                if number:
                    opening.frames = &counts[0]
                else:
                    opening.rows = &counts[0]
            key_rows = self.key_rows
            opening.key_rows = &key_rows[0]
        opening.stamps = <uint32_t*>self.memory(n * sizeof(uint32_t))
        opening.in_chunk = <int32_t*>self.memory(num_chunks(opening) * sizeof(int32_t))
        for chunk in range(num_chunks(opening)):
            opening.in_chunk[chunk] = -1
        opening.places = <int32_t*>self.memory(num_chunks(opening) * self.num_shards * sizeof(int32_t))
        opening.first = <Py_ssize_t*>self.memory(self.num_shards * sizeof(Py_ssize_t))
        opening.last = <Py_ssize_t*>self.memory(self.num_shards * sizeof(Py_ssize_t))
        opening.each = <Decision*>calloc(opening.shards.num_shards, sizeof(Decision))
        if opening.each == NULL:
            raise MemoryError("cannot allocate a plan")
        return 0

    cdef void* memory(self, Py_ssize_t num_bytes) except? NULL:
        """Return uninitialized memory that is the plan's; NULL for 0 bytes."""
        cdef uint8_t[::1] memory = self.directory.array(np.uint8, num_bytes)
        self.arrays.append(memory)
        return &memory[0] if num_bytes else NULL

    cdef int find(self) except -1:
        """Find the keys, and partition those that are absent by shard."""
        cdef Opening* opening = &self.opening
        cdef Py_ssize_t s, n = opening.num_keys
        cdef bint by_shard = opening.shards.mostly_new and n >= KEYS_PER_SHARD * self.num_shards
        if not by_shard:
            opening.listed = <int32_t*>self.memory(n * sizeof(int32_t))
        self.each(list_chunk if by_shard else find_chunk, num_chunks(opening), n)
        n = opening.num_listed = place_chunks(opening)
        opening.absent_keys = <AbsentKey*>self.memory(n * sizeof(AbsentKey))
        opening.fate = <uint8_t*>self.memory(n)
        self.each(deal_chunk, num_chunks(opening), n)
        if by_shard:
            self.each(find_absent, self.num_shards, n)
        for s in range(self.num_shards):
            self.num_absent += opening.last[s] - opening.first[s]
        return 0

    cdef int mark_touched(self) except -1:
        """Mark the rows of this opening for evictions, if the stamps do not tell them apart: a clock that stood still or
        went back."""
        cdef Opening* opening = &self.opening
        cdef Py_ssize_t i
        if not opening.shards.policy.evict or opening.clock > opening.shards.newest or not self.num_absent:
            return 0
        if opening.shards.touched == NULL:
            opening.shards.touched = <unsigned char*>calloc(opening.shards.capacity // 8 + 1, 1)
            if opening.shards.touched == NULL:
                raise MemoryError("cannot allocate the marks of a directory")
        opening.marked = True
        for i in range(opening.num_keys):
            if opening.key_rows[i] >= 0:
                opening.shards.touched[opening.key_rows[i] >> 3] |= 1 << (opening.key_rows[i] & 7)
        return 0

    cdef void unmark_touched(self) noexcept:
        cdef Opening* opening = &self.opening
        cdef Py_ssize_t i
        for i in range(opening.num_keys if opening.marked else 0):
            if opening.key_rows[i] >= 0:
                opening.shards.touched[opening.key_rows[i] >> 3] = 0
        opening.marked = False

    cdef void add_up(self) noexcept:
        cdef Py_ssize_t s
        cdef Decision* decision
        for s in range(self.opening.shards.num_shards):
            decision = &self.opening.each[s]
            self.num_admitted += decision.num_admitted
            self.num_expired += decision.num_expired
            self.num_evicted += decision.num_evicted
            self.num_rejected += decision.num_rejected
