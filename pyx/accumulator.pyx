"""Sums the rows of an id, in arrival order, and counts in how many frames the id occurred.

An accumulator holds the sums of one table. Frames enter through ``frame_accumulate.Intake``, the only driver; ``drain``
hands the sums over, and memory that was handed over is never written again while a reference to it exists. The ids are
divided among parts, and each part walks all rows: parts may run on separate threads, and an id's sum is one left fold.
"""

import numpy as np

from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset

from ._types cimport id_t, index_t
from .gradient_blocks cimport GradientBlocks
from .id_map cimport IdBits, IdMap
from .id_table cimport Slot, table_free, table_init, table_reserve
from .buffer_pool cimport Block, Pool, Sums
from .buffer_pool import divide
from .coalesce cimport Index, Mark, Part, part_add, part_carry, part_clear, part_undo

cdef enum:
    # Above this a direct map (4 bytes per id) is larger than what most streams touch: ids are hashed.
    LARGEST_MAP = 1 << 27


cdef class Accumulator:
    """One table's coalesced gradients since the last drain.

    dim : floats per row; 0: only ids are counted
    dtype : what is summed and in which precision, float32 or float64
    vocabulary_size : ids are below it, and ``num_distinct`` is counted; None: any int64 is an id
    count : whether the frames of every id are counted, for a mean; count_rows : whether its rows are
    """

    def __cinit__(self, Py_ssize_t dim, dtype="float32", vocabulary_size=None, bint count=True,
                  bint count_rows=False):
        if dim < 0:
            raise ValueError(f"dim must be at least 0, got {dim}")
        self.dim = dim
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype}")
        self.wide = self.dtype == np.float64
        self.row_bytes = dim * self.dtype.itemsize
        self.count, self.count_rows = count, count_rows
        self._pool, self.blocks = Pool(), GradientBlocks()
        self._ids, self._sums, self._first_seen, self._marks, self._rows = ([None] * MOST_PARTS for _ in range(5))
        if vocabulary_size is not None:
            self.index.vocabulary_size = vocabulary_size
            if vocabulary_size <= LARGEST_MAP:
                self.map = IdMap(vocabulary_size)
                self.index.entries = self.map.entries
            else:
                self.seen = IdBits(vocabulary_size)
                self.index.seen = self.seen.bits
        self._set_parts(1)

    def __dealloc__(self):
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            table_free(&self.parts[p].table)

    def __len__(self):
        """Distinct ids held."""
        return self.held()

    cdef Py_ssize_t held(self) noexcept:
        cdef Py_ssize_t p, n = 0
        for p in range(self.num_parts):
            n += self.parts[p].num_ids
        return n

    @property
    def num_distinct(self):
        """Distinct ids added since ``start_counting``, drained or held; 0 where the vocabulary is unknown."""
        cdef Py_ssize_t p, n = 0
        for p in range(self.num_parts):
            n += self.parts[p].num_distinct
        return n

    @property
    def nbytes(self):
        """Bytes held for sums, ids, counts and the index, and for those to come."""
        return self.num_bytes()

    cdef Py_ssize_t num_bytes(self) noexcept:
        cdef Py_ssize_t p, slots = 0
        cdef Py_ssize_t per_id = self.row_bytes + 9 + self.count * sizeof(Mark) + self.count_rows * sizeof(index_t)
        for p in range(self.num_parts):
            slots += self.parts[p].table.reserved
        return (self.held() * per_id + slots * sizeof(Slot) + (self.map.num_bytes if self.map is not None else 0)
                + self._pool.num_bytes())

    # ---- a frame in: for Intake

    cdef int begin(self, list blocks, index_t frame, Py_ssize_t num_parts) except -1:
        """Make room for one more frame, or for more of the last one.

        blocks : (ids, grads, row_index, scales) each, as ``Intake.begin`` describes them
        frame : its number; an id that occurs twice in one frame counts once
        num_parts : a power of two; the number of parts from the next time on that nothing is held
        Raises MemoryError or ValueError: nothing has changed then.
        """
        cdef Py_ssize_t p, num_rows, held = self.held()
        num_rows = self.blocks.point_to(blocks, self.dim, self.wide)
        if held == 0:
            num_parts = min(num_parts, <Py_ssize_t>MOST_PARTS)
            if num_parts != self.num_parts:
                self._set_parts(num_parts)
            self.first_frame = frame
        if self.map is not None:
            self.map.make_room(num_rows)
            self.index.base, self.index.run_base = self.map.base, self.map.run_base
        for p in range(self.num_parts):
            self._reserve(p, num_rows)
            if self.count and frame != self.first_frame:
                self._start_marks(p)
        self.rows_begun = num_rows
        return 0

    cdef int end(self) except -1:
        """Count the frame that was added."""
        self.num_rows += self.rows_begun
        return self.cancel()

    cdef int cancel(self) except -1:
        """Release the frame that was begun."""
        self.rows_begun = 0
        self.blocks.clear()
        return 0

    cdef int undo(self) except -1:
        """Remove what was added of the frame; only where nothing was held before it."""
        cdef Py_ssize_t p
        for p in range(self.num_parts):
            part_undo(&self.parts[p], &self.index)
        return self.cancel()

    # ---- sums out

    cpdef tuple drain(self, bint mean=False):
        """Hand over what has been summed and start anew.

        mean : divide each row by its dtype(number of frames that contained it)
        Returns one ``Sums`` per part; an id is in one of them, in order of first appearance. Raises MemoryError:
        nothing has changed then.
        """
        # Everything that can fail comes before the first change.
        cdef tuple drained = self.sums()
        cdef list divided = [(drained[p].sums, self._occurrences(p)[:, 1]) for p in range(self.num_parts)
                             if mean and self._marks[p] is not None]
        for sums, counts in divided:
            divide(sums, counts)
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
            self.seen = IdBits(self.index.vocabulary_size)
            self.index.seen = self.seen.bits

    def get_state(self):
        """Return copies of the sums that are not drained yet."""
        held, marks = self.sums(), np.concatenate([self._occurrences(p) for p in range(self.num_parts)])
        names = ("ids", "sums", "rows") if self.count_rows else ("ids", "sums")
        arrays = {of: np.concatenate([getattr(part, of) for part in held]) for of in names}
        return arrays | {"counts": marks[:, 1].copy(), "frames": marks[:, 0].copy()}

    def set_state(self, state):
        """Replace the sums by those of ``get_state``. Later frames have other numbers."""
        cdef bint outside
        ids, sums = np.array(state["ids"], np.int64), np.array(state["sums"], self.dtype, order="C")
        kept = np.stack([state["frames"], state["counts"]], axis=1).astype(np.int64, copy=False)
        if not len(np.unique(ids)) == len(ids) == len(kept) or sums.shape != (len(ids), self.dim):
            raise ValueError(f"expected different ids, as many counts, sums ({len(ids)}, {self.dim}), got {sums.shape}")
        self.undo()
        self.begin([(ids, sums, None, None)], -1, 1)
        with nogil:
            outside = part_add(&self.parts[0], &self.index, self.blocks.sources, self.blocks.num_sources,
                               self.dim, self.wide, False, -1, 0, 1)
        if outside:
            self.undo()
            raise ValueError(f"an id is not below the vocabulary's {self.index.vocabulary_size}")
        self.end()
        if self.count:
            self._start_marks(0)
            self._marks[0].array(np.int64, len(ids), 2)[:] = kept
        if self.count_rows and len(ids):
            (<Block>self._rows[0]).array(np.int64, len(ids))[:] = state["rows"]
        part_carry(&self.parts[0])

    cdef int _clear(self) except -1:
        """Hold nothing; what was counted stays so."""
        cdef Py_ssize_t p, most = 0
        for p in range(self.num_parts):
            most = max(most, self.parts[p].num_ids)
            self._ids[p], self._sums[p], self._marks[p], self._rows[p] = None, None, None, None
            part_clear(&self.parts[p], &self.index)
            self.parts[p].marks, self.parts[p].rows = NULL, NULL
        if self.map is not None:
            self.map.base += most
        return 0

    cdef int _set_parts(self, Py_ssize_t num_parts) except -1:
        cdef Py_ssize_t p, distinct = self.num_distinct
        if num_parts < 1 or num_parts & (num_parts - 1):
            raise ValueError(f"num_parts must be a power of two, got {num_parts}")
        while self.num_parts < num_parts:
            # Whole after each: the next table may find no room.
            memset(&self.parts[self.num_parts], 0, sizeof(Part))
            table_init(&self.parts[self.num_parts].table, 0)
            self.num_parts += 1
        while self.num_parts > num_parts:
            self.num_parts -= 1
            table_free(&self.parts[self.num_parts].table)
            for blocks in (self._ids, self._sums, self._first_seen, self._marks):
                blocks[self.num_parts] = None  # back to the pool
        for p in range(num_parts):
            self.parts[p].num_distinct = 0 if p else distinct
        return 0

    cdef int _reserve(self, Py_ssize_t p, Py_ssize_t num_rows) except -1:
        """Room for as many new ids as there are rows, or as the vocabulary has, in all that grows with ids."""
        cdef Part* part = &self.parts[p]
        cdef Py_ssize_t room = part.num_ids + num_rows
        if self.index.vocabulary_size:
            room = min(room, <Py_ssize_t>self.index.vocabulary_size)
        # One more: find_direct writes one beyond the end.
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
        if self.map is None:
            table_reserve(&part.table, room)
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

    cdef int _start_marks(self, Py_ssize_t p) except -1:
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

    def _occurrences(self, Py_ssize_t p):
        """The last frame and the number of frames of each id of a part: int64 (n, 2), a copy."""
        n = self.parts[p].num_ids
        if self._marks[p] is None:
            return np.tile(np.array([self.first_frame, 1], np.int64), (n, 1))
        return self._marks[p].array(np.int64, n, 2).copy()
