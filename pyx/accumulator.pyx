"""Sums the rows of an id, in arrival order, and counts in how many frames the id occurred.

An accumulator holds the sums of one table. Frames enter through ``frame_accumulate.Intake``, the only driver; ``drain``
hands the sums over, and memory that was handed over is never written again while a reference to it exists. Ids are looked
up in coalesce.pyx and rows folded in row_sums.pyx, part by part, on any number of threads: an id's sum is one left fold.
"""

import numpy as np

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy, memset

from ._types cimport id_t, index_t
from .gradient_blocks cimport GradientBlocks, blocks_of
from .id_table cimport MOST_SLOTS, Bucket, IdBits, IdMap, best_isa, id_buckets_free, id_buckets_reserve
from .buffer_pool cimport Block, Pool, Sums
from .coalesce cimport Mark, Part, divide, harmless, part_begin, part_carry, part_clear, part_find, part_undo
from .row_sums cimport part_fold

cdef enum:
    # Above this a direct map (4 bytes per id) is larger than what most streams touch: ids are hashed.
    LARGEST_MAP = 1 << 27


def targets():
    """The instruction sets that sums and rules are compiled for and this machine has, the best first."""
    return ["avx512", "avx2", "baseline"][2 - best_isa():]


cdef int isa_of(str target) except -1:
    """The instruction set of one of ``targets``; "": the best. Raises ValueError for another one."""
    return best_isa() - (targets().index(target) if target else 0)


cdef class Accumulator:
    """One table's coalesced gradients since the last drain.

    dim : floats per row; 0: only ids are counted
    dtype : what is summed and in which precision, float32 or float64
    vocabulary_size : ids are below it, and ``num_distinct`` is counted; None: any int64 is an id
    count : whether the frames of every id are counted, for a mean; count_rows : whether its rows are
    target : one of ``targets``; "": the best
    """

    def __cinit__(self, Py_ssize_t dim, dtype="float32", vocabulary_size=None, bint count=True,
                  bint count_rows=False, str target=""):
        self._pool = Pool()
        self._ids, self._sums, self._first_seen, self._marks, self._rows, self._slots, self._picked = (
            [None] * MOST_PARTS for _ in range(7))
        if dim < 0:
            raise ValueError(f"dim must be at least 0, got {dim}")
        self.dim = dim
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype}")
        self.row_bytes = dim * self.dtype.itemsize
        self.count, self.count_rows = count, count_rows
        self.frame.dim, self.frame.wide = dim, self.dtype == np.float64
        self.frame.isa = isa_of(target)
        if vocabulary_size is not None:
            self.vocabulary.size = vocabulary_size
            if vocabulary_size <= LARGEST_MAP:
                self.map = IdMap(vocabulary_size)
                self.vocabulary.entries = self.map.entries
            else:
                self.seen = IdBits(vocabulary_size)
                self.vocabulary.seen = self.seen.bits
        self.set_parts(1)

    def __dealloc__(self):
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            id_buckets_free(&self.parts[p].buckets)

    def __len__(self):
        """Distinct ids held."""
        return self.held()

    @property
    def num_distinct(self):
        """Distinct ids added since ``start_counting``, drained or held; 0 where the vocabulary is unknown."""
        return self.distinct()

    # ---- a frame in: for Intake

    cdef int begin(self, GradientBlocks blocks, index_t frame, Py_ssize_t num_parts, Py_ssize_t room=-1,
                   Py_ssize_t longest=-1, Py_ssize_t most=-1) except -1:
        """Make room for one more frame, or for more of the last one.

        blocks : of rows of the accumulator's dim and type
        frame : its number; an id that occurs twice in one frame counts once
        num_parts : a power of two; the number of parts from the next time on that nothing is held
        room : where the blocks have several frames: the rows between two openings, at most; longest : those of one
            frame; most : of all that are added
        Raises MemoryError or ValueError: nothing has changed then.
        """
        cdef Py_ssize_t p, num_rows, held = self.held()
        cdef double largest = 0
        num_rows, self.blocks = blocks.num_rows, blocks
        self.frame.sources, self.frame.num_sources, self.frame.number = blocks.sources, blocks.num_sources, frame
        if held == 0:
            num_parts = min(num_parts, <Py_ssize_t>MOST_PARTS)
            if num_parts != self.num_parts:
                self.set_parts(num_parts)
            self.first_frame = frame
        if self.map is not None:
            self.map.make_room(held + (num_rows if most < 0 else most))
            self.vocabulary.base, self.vocabulary.run_base = self.map.base, self.map.run_base
        for p in range(self.num_parts):
            self.reserve(p, num_rows if room < 0 else room)
            self.reserve_slots(p, num_rows if longest < 0 else longest)
            if self.count and frame != self.first_frame:
                self.start_marks(p)
            largest = max(largest, self.parts[p].largest)
        self.frame.harmless = harmless(largest, num_rows, self.frame.wide)
        self.rows_begun = num_rows
        return 0

    cdef int end(self) except -1:
        """Count the frame that was added."""
        self.num_rows += self.rows_begun
        return self.cancel()

    cdef int cancel(self) except -1:
        """Release the frame that was begun."""
        self.release_slots()
        self.rows_begun = 0
        self.blocks, self.frame.num_sources = None, 0
        return 0

    cdef int end_steps(self, Py_ssize_t num_rows, Py_ssize_t most_ids) except -1:
        """Count the rows of several frames, of which some were taken out by steps without a drain.

        most_ids : of one step
        """
        cdef Py_ssize_t p
        cdef Block block
        for p in range(self.num_parts):
            for blocks, width in ((self._ids, sizeof(id_t)), (self._sums, self.row_bytes), (self._marks, sizeof(Mark))):
                block = blocks[p]
                if block is not None:
                    block.touched = max(block.touched, min(block.size, most_ids * <Py_ssize_t>width))
            if not self.parts[p].num_ids:
                self._marks[p], self.parts[p].marks = None, NULL
        if self.map is not None:
            self.map.base = self.vocabulary.base
        self.num_rows += num_rows
        return self.cancel()

    cdef int undo(self) except -1:
        """Remove what was added of the frame; only where nothing was held before it."""
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            part_undo(&self.parts[p], &self.vocabulary)
        return self.cancel()

    # ---- sums out

    cpdef tuple drain(self, bint mean=False):
        """Hand over what has been summed and start anew.

        mean : divide each row by its dtype(number of frames that contained it)
        Returns one ``Sums`` per part; an id is in one of them, in order of first appearance. Raises MemoryError:
        nothing has changed then.
        """
        cdef Py_ssize_t p
        cdef tuple drained = self.sums()  # all that can fail
        for p in range(self.num_parts):
            if mean and self.parts[p].marks != NULL:
                if self.frame.wide:
                    divide(&self.parts[p], <double*>self.parts[p].sums, self.dim)
                else:
                    divide(&self.parts[p], <float*>self.parts[p].sums, self.dim)
        self._clear()
        return drained

    cpdef tuple sums(self):
        """Return the sums, without handing them over: one ``Sums`` per part, not divided."""
        cdef Py_ssize_t p
        cdef Sums sums
        cdef list parts = []
        for p in range(self.num_parts):
            sums = Sums.__new__(Sums)
            sums.num_ids, sums.dim, sums.dtype = self.parts[p].num_ids, self.dim, self.dtype
            sums.counts_rows = self.count_rows
            if sums.num_ids:
                sums.id_block, sums.sum_block = self._ids[p], self._sums[p]
                if self.count_rows:
                    sums.row_block, (<Block>self._rows[p]).used = self._rows[p], sums.num_ids * sizeof(index_t)
                sums.id_block.used, sums.sum_block.used = sums.num_ids * sizeof(id_t), sums.num_ids * self.row_bytes
            parts.append(sums)
        return tuple(parts)

    def counts(self):
        """Return in how many frames each id occurred: int64 (len(self),), part by part as ``sums`` lists the ids."""
        return np.concatenate([self._occurrences(p)[:, 1] for p in range(self.num_parts)])

    def start_counting(self):
        """``num_distinct`` and ``num_rows`` are 0 from here; what is held counts only where it comes again."""
        cdef Py_ssize_t p
        self.num_rows = 0
        for p in range(self.num_parts):
            part_carry(&self.parts[p])
        if self.map is not None:
            self.map.run_base = self.map.base
        elif self.seen is not None:
            self.seen = IdBits(self.vocabulary.size)
            self.vocabulary.seen = self.seen.bits

    def get_state(self):
        """Return copies of the sums that are not drained yet."""
        parts, marks = self.sums(), np.concatenate([self._occurrences(p) for p in range(self.num_parts)])
        names = ("ids", "sums", "rows") if self.count_rows else ("ids", "sums")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return arrays | {"counts": marks[:, 1].copy(), "frames": marks[:, 0].copy()}

    def set_state(self, state):
        """Replace the sums by those of ``get_state``. Later frames have other numbers."""
        cdef bint outside
        cdef int no = 0
        ids, sums = np.array(state["ids"], np.int64), np.array(state["sums"], self.dtype, order="C")
        kept = np.stack([state["frames"], state["counts"]], axis=1).astype(np.int64, copy=False)
        if not len(np.unique(ids)) == len(ids) == len(kept) or sums.shape != (len(ids), self.dim):
            raise ValueError(f"expected different ids, as many counts, sums ({len(ids)}, {self.dim}), got {sums.shape}")
        self.undo()
        self.begin(blocks_of([(ids, sums, None, None)], self.dim, self.frame.wide), -1, 1)
        self.frame.strict = False
        with nogil:
            outside = part_find(&self.parts[0], &self.vocabulary, &self.frame, 0, 1, &no)
            if not outside and self.dim:
                part_fold(&self.parts[0], &self.frame, &no)
        if outside:
            self.undo()
            raise ValueError(f"an id is not below the vocabulary's {self.vocabulary.size}")
        self.end()
        if self.count:
            self.start_marks(0)
            self._marks[0].array(np.int64, len(ids), 2)[:] = kept
        if self.count_rows and len(ids):
            (<Block>self._rows[0]).array(np.int64, len(ids))[:] = state["rows"]
        part_carry(&self.parts[0])

    cdef int _clear(self) except -1:
        """Hold nothing; what was counted stays so."""
        cdef Py_ssize_t p, most = 0
        for p in range(self.num_parts):
            self._ids[p], self._sums[p], self._marks[p], self._rows[p] = None, None, None, None
            most = max(most, self.parts[p].num_ids)
            part_clear(&self.parts[p], &self.vocabulary)
            self.parts[p].marks, self.parts[p].rows = NULL, NULL
        if self.map is not None:
            self.map.base += most
        return 0

    def _occurrences(self, Py_ssize_t p):
        """The last frame and the number of frames of each id of a part: int64 (n, 2), a copy."""
        n = self.parts[p].num_ids
        if self._marks[p] is None:
            return np.tile(np.array([self.first_frame, 1], np.int64), (n, 1))
        return self._marks[p].array(np.int64, n, 2).copy()

    # ---- memory: blocks of a pool for all that grows with ids or with the rows of a frame. What a frame may need at
    # most is reserved before it enters, so that adding it cannot fail.

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
        return (self.held() * self.bytes_per_id() + buckets * sizeof(Bucket) + self._pool.touched_bytes()
                + (self.map.memory.num_bytes if self.map is not None else 0))

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
