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
from .coalesce cimport (
    Mark, Part, divide, harmless, make_room, part_begin, part_carry, part_clear, part_find, part_undo, row_t, space_for,
    split_begin,
)
from .row_sums cimport part_fold

cdef enum:
    # Above this a direct map (4 bytes per id) is larger than what most streams touch: ids are hashed.
    LARGEST_MAP = 1 << 27

cdef Py_ssize_t MOST_IDS = <Py_ssize_t>1 << 62


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
        self._held, self._spare, self._of_frame = [], [], []
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
        if self.count and frame != self.first_frame:
            self.start_marks()
        self.reserve(num_rows if room < 0 else room)
        for p in range(self.num_parts):
            largest = max(largest, self.parts[p].largest)
        self.reserve_slots(num_rows if longest < 0 else longest)
        self.frame.harmless = harmless(largest, num_rows, self.frame.wide)
        self.rows_begun = num_rows
        return 0

    cdef int end(self) except -1:
        """Count the frame that was added."""
        self.num_rows += self.rows_begun
        return self.cancel()

    cdef int cancel(self) except -1:
        """Release the frame that was begun."""
        if self.split.moved:
            self._move()
        self._of_frame, self.parts[0].slots = [], NULL
        self.rows_begun = 0
        self.blocks, self.frame.num_sources = None, 0
        return 0

    cdef int end_steps(self, Py_ssize_t num_rows, Py_ssize_t most_ids) except -1:
        """Count the rows of several frames, of which some were taken out by steps without a drain.

        most_ids : of one step
        """
        cdef Block block
        for block, width in zip(self._held, (sizeof(id_t), 1, self.row_bytes, sizeof(Mark))):
            if block is not None:
                block.touched = max(block.touched, min(block.size, most_ids * <Py_ssize_t>width))
        if not self.parts[0].num_ids and self.space.marks != NULL:
            self._held[3], self.space.marks, self.parts[0].marks = None, NULL, NULL
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
        cdef Py_ssize_t p, held = self.held()
        cdef Sums sums
        cdef list parts = []
        for p in range(self.num_parts):
            sums = Sums.__new__(Sums)
            sums.num_ids, sums.dim, sums.dtype = self.parts[p].num_ids, self.dim, self.dtype
            sums.counts_rows = self.count_rows
            if sums.num_ids:
                sums.first = self.parts[p].ids - self.space.ids
                sums.id_block, sums.sum_block, sums.row_block = self._held[0], self._held[2], self._held[4]
                sums.id_block.used = held * sizeof(id_t)
                if self.dim:
                    sums.sum_block.used = held * self.row_bytes
                if self.count_rows:
                    sums.row_block.used = held * sizeof(index_t)
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
            outside = part_find(&self.parts[0], &self.vocabulary, &self.frame, &no)
            if not outside and self.dim:
                part_fold(&self.parts[0], &self.frame, &no)
        if outside:
            self.undo()
            raise ValueError(f"an id is not below the vocabulary's {self.vocabulary.size}")
        self.end()
        if self.count and len(ids):
            self.start_marks()
            (<Block>self._held[3]).array(np.int64, len(ids), 2)[:] = kept
        if self.count_rows and len(ids):
            (<Block>self._held[4]).array(np.int64, len(ids))[:] = state["rows"]
        part_carry(&self.parts[0])

    cdef int _clear(self) except -1:
        """Hold nothing; what was counted stays so."""
        cdef Py_ssize_t p, most = 0
        for p in range(self.num_parts):
            most = max(most, self.parts[p].num_ids)
            part_clear(&self.parts[p], &self.vocabulary)
            self.parts[p].marks, self.parts[p].rows, self.parts[p].room = NULL, NULL, 0
        self._held, self._spare, self.space.marks = [], [], NULL
        if self.map is not None:
            self.map.base += most
        return 0

    def _occurrences(self, Py_ssize_t p):
        """The last frame and the number of frames of each id of a part: int64 (n, 2), a copy."""
        n = self.parts[p].num_ids
        if self.space.marks == NULL or not n:
            return np.tile(np.array([self.first_frame, 1], np.int64), (n, 1))
        return (<Block>self._held[3]).array(np.int64, n, 2, self.parts[p].ids - self.space.ids).copy()

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
        cdef Py_ssize_t p, buckets = 0, spare = 0
        cdef Block block
        for p in range(self.num_parts):
            buckets += self.parts[p].buckets.touched
        for block in self._spare:
            spare += block.touched if block is not None else 0
        return (spare + self.held() * self.bytes_per_id() + buckets * sizeof(Bucket) + self._pool.touched_bytes()
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
        for p in range(num_parts):
            self.parts[p].num_distinct = 0 if p else distinct
        return 0

    cdef int reserve(self, Py_ssize_t num_rows) except -1:
        """Room for as many new ids as there are rows, or as the vocabulary has, in all that grows with ids.

        Where there are several parts, each gets its room when the rows are split.
        """
        cdef Py_ssize_t p, most, room = self.held() + num_rows
        if self.vocabulary.size and self.num_parts == 1:
            room = min(room, <Py_ssize_t>self.vocabulary.size)
        if room > MOST_SLOTS:
            raise MemoryError(f"{room} ids between two openings: at most {MOST_SLOTS} of one table")
        if self.map is None:
            for p in range(self.num_parts):
                most = self.parts[p].num_ids + num_rows
                if self.vocabulary.size:
                    most = min(most, <Py_ssize_t>self.vocabulary.size)
                if not id_buckets_reserve(&self.parts[p].buckets, most, self.parts[p].ids):
                    raise MemoryError(f"no memory for the index of {most} ids")
        if self.num_parts > 1 or room > self.parts[0].room:
            self._take_spare(room)
        self.split.parts, self.split.row_bytes = self.parts, self.row_bytes
        if self.num_parts == 1:
            room -= self.parts[0].num_ids
            if make_room(self.parts, 1, &room, &self.split.spare, self.row_bytes):
                self._move()
        return 0

    cdef int _take_spare(self, Py_ssize_t num_ids) except -1:
        """Have a spare space in which so many ids fit, however they are spread over the parts."""
        cdef Py_ssize_t i, room = space_for(num_ids, self.num_parts)
        cdef Space* spare = &self.split.spare
        cdef bint marked = self.space.marks != NULL
        cdef Py_ssize_t[5] widths = [sizeof(id_t), 1, self.row_bytes, sizeof(Mark) if marked else 0,
                                     sizeof(index_t) if self.count_rows else 0]
        cdef char* memory[5]
        cdef Block block
        cdef list blocks = []
        if self._spare and spare.num_ids >= room and (spare.marks != NULL) == marked:
            return 0
        self._spare, spare.num_ids = [], MOST_IDS
        for i in range(5):
            block, memory[i] = None, NULL
            if widths[i]:
                block = self._pool.take(room * widths[i])
                memory[i], spare.num_ids = block.memory, min(spare.num_ids, block.size // widths[i])
            blocks.append(block)
        spare.ids, spare.first_seen, spare.sums = <id_t*>memory[0], <uint8_t*>memory[1], memory[2]
        spare.marks, spare.rows = <Mark*>memory[3], <index_t*>memory[4]
        self._spare = blocks
        return 0

    cdef int _move(self) except -1:
        """What is held is in the spare space now."""
        self._held, self.space, self._spare, self.split.moved = self._spare, self.split.spare, [], False
        return 0

    cdef int reserve_slots(self, Py_ssize_t num_rows) except -1:
        """Room for the slots of all rows of a frame, and to split them where there are several parts."""
        cdef Py_ssize_t p, i, room
        cdef Split* split = &self.split
        if num_rows > MOST_SLOTS:
            raise MemoryError(f"{num_rows} rows in a frame: at most {MOST_SLOTS} of one table")
        self._of_frame = []
        for p in range(self.num_parts):
            part_begin(&self.parts[p])
        if self.num_parts == 1:
            self.parts[0].slots = <uint32_t*>self._room_for(num_rows * sizeof(uint32_t))
            return 0
        split_begin(split, num_rows, self.num_parts)
        split.starts, split.ids, split.scales = self.blocks.starts, NULL, NULL
        split.ends = <uint32_t*>self._room_for(split.num_stripes * self.num_parts * sizeof(uint32_t))
        room = num_rows + split.rows_per_stripe    # see split_stripe
        split.slots = <uint32_t*>self._room_for(room * sizeof(uint32_t))
        split.rows = <row_t*>self._room_for(room * sizeof(row_t))
        if not 0 < self.vocabulary.size <= <id_t>1 << 32:
            split.ids = <id_t*>self._room_for(room * sizeof(id_t))
        for i in range(self.blocks.num_sources):
            if self.blocks.sources[i].scales != NULL:
                split.scales = <float*>self._room_for(room * sizeof(float))
                break
        return 0

    cdef void* _room_for(self, Py_ssize_t num_bytes) except NULL:
        """Memory until the end of the frame."""
        cdef Block block = self._pool.take(num_bytes)
        block.used = num_bytes
        self._of_frame.append(block)
        return block.memory

    cdef int start_marks(self) except -1:
        """From the second frame on every id has a mark; so far each occurred in the first one."""
        cdef Py_ssize_t p, i
        cdef Part* part
        if self.space.marks != NULL or not self._held:
            return 0
        self._held[3] = self._pool.take(self.space.num_ids * sizeof(Mark))
        self.space.marks = <Mark*>(<Block>self._held[3]).memory
        for p in range(self.num_parts):
            part = &self.parts[p]
            part.marks = self.space.marks + (part.ids - self.space.ids)
            for i in range(part.num_ids):
                part.marks[i].frame, part.marks[i].count = self.first_frame, 1
        return 0

    def _give_out(self, Py_ssize_t num_slots):
        """For tests: as if so many slots had been given out before. Only while nothing is held."""
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            self.parts[p].buckets.base = <uint32_t>num_slots
