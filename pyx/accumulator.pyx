"""Sums the rows of an id, in arrival order, and counts in how many frames the id occurred.

An accumulator holds the sums of one table. Frames enter through ``frame_accumulate.Intake``, the only driver; ``drain``
hands the sums over, and memory that was handed over is never written again while a reference to it exists. Ids are looked
up in coalesce.pyx and rows folded in row_sums.pyx, part by part, on any number of threads: an id's sum is one left fold.
"""

import numpy as np

from ._types cimport id_t, index_t
from .gradient_blocks cimport GradientBlocks, blocks_of
from .id_table cimport IdBits, IdMap, best_isa
from .buffer_pool cimport Block, Sums
from .coalesce cimport Mark, divide, harmless, part_carry, part_clear, part_find, part_undo
from .part_memory cimport MOST_PARTS, PartMemory
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


cdef class Accumulator(PartMemory):
    """One table's coalesced gradients since the last drain.

    dim : floats per row; 0: only ids are counted
    dtype : what is summed and in which precision, float32 or float64
    vocabulary_size : ids are below it, and ``num_distinct`` is counted; None: any int64 is an id
    count : whether the frames of every id are counted, for a mean; count_rows : whether its rows are
    target : one of ``targets``; "": the best
    """

    def __cinit__(self, Py_ssize_t dim, dtype="float32", vocabulary_size=None, bint count=True,
                  bint count_rows=False, str target=""):
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
