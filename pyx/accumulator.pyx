"""Sums the rows of an id, in arrival order, and counts in how many frames the id occurred.

Two passes. ``resolve`` looks every id up, in order, on one thread; ``fold`` adds the rows and may
be split over threads by ownership of dense indices: every thread walks all rows in order and
touches only the sums it owns, so the sum of an id is one left fold whatever the split.
"""

import numpy as np

from libc.string cimport memcpy

from ._types cimport id_t, index_t, real_t
from .id_table cimport Table, prefetch, slot_of, table_clear, table_free, table_init, table_insert, table_reserve

# Indices go to threads in blocks of this many, so that two threads rarely write one cache line.
cdef index_t BLOCK = 64

cdef enum:
    AHEAD = 16  # rows whose memory is asked for before it is needed: no cache holds a large table
    ROOMY = 8   # memory is kept for the next sums where it is at most this many times what the last ones took


cdef class Accumulator:
    """One table's coalesced gradients since the last drain.

    dim : floats per row
    dtype : what is summed and in which precision, float32 or float64
    Not thread safe, but for ``fold`` of different parts of the same rows.
    """

    cdef Table table
    cdef readonly Py_ssize_t dim
    cdef readonly object dtype
    cdef object _ids, _counts, _frames, _sums

    def __cinit__(self, Py_ssize_t dim, dtype="float32"):
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype}")
        table_init(&self.table, 0)
        self._start()

    def __dealloc__(self):
        table_free(&self.table)

    def __len__(self):
        """Distinct ids held."""
        return self.table.num_ids

    @property
    def nbytes(self):
        """Bytes held for sums, ids, counts and the hash table."""
        per_slot = 16
        arrays = self._ids.nbytes + self._counts.nbytes + self._frames.nbytes + self._sums.nbytes
        return arrays + self.table.capacity * per_slot

    def _start(self):
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._frames = np.empty(0, np.int64)
        self._sums = np.empty((0, self.dim), self.dtype)

    def resolve(self, const id_t[::1] ids not None, index_t frame):  # IN
        """Look the ids of one frame up and count them; follow with ``fold`` of every part.

        ids : int64, shape (n,), in arrival order
        frame : number of the frame; an id that occurs twice in one frame counts once
        Returns int64, shape (n,): the dense index of every row, and ~index where the id is new.
        """
        cdef Py_ssize_t i, n = ids.shape[0]
        cdef index_t index
        cdef bint is_new
        room = self.table.num_ids + n
        # Worst case first: from here on the loop cannot fail half way.
        table_reserve(&self.table, room)
        self._ids = grown(self._ids, self.table.num_ids, room)
        self._counts = grown(self._counts, self.table.num_ids, room)
        self._frames = grown(self._frames, self.table.num_ids, room)
        out = np.empty(n, np.int64)
        cdef index_t[::1] order = out
        cdef id_t[::1] seen = self._ids
        cdef index_t[::1] counts = self._counts
        cdef index_t[::1] frames = self._frames
        with nogil:
            for i in range(n):
                if i + AHEAD < n:
                    prefetch(&self.table.slots[slot_of(&self.table, ids[i + AHEAD])])
                index = table_insert(&self.table, ids[i], &is_new)
                if is_new:
                    seen[index] = ids[i]
                    counts[index] = 1
                    frames[index] = frame
                    order[i] = ~index
                else:
                    if frames[index] != frame:
                        counts[index] += 1
                        frames[index] = frame
                    order[i] = index
        try:
            self._sums = grown(self._sums, self._sums.shape[0], self.table.num_ids)
        except MemoryError:
            # Ids without sums would be taken for known ones later, and their sums would start as garbage.
            self._forget(out, room - n, frame)
            raise
        return out

    cdef int _forget(self, const index_t[::1] order, index_t num_before, index_t frame) except -1:
        """Undo the look-ups of a frame that was resolved in one piece."""
        cdef Py_ssize_t i
        cdef bint is_new
        cdef id_t[::1] seen = self._ids
        cdef index_t[::1] counts = self._counts
        cdef index_t[::1] frames = self._frames
        for i in range(order.shape[0]):
            if 0 <= order[i] < num_before and frames[order[i]] == frame:
                counts[order[i]] -= 1
                frames[order[i]] = -1
        table_clear(&self.table)
        for i in range(num_before):
            table_insert(&self.table, seen[i], &is_new)
        return 0

    def fold(self, const index_t[::1] order not None, grads not None, index_t part=0, index_t num_parts=1):  # IN
        """Add the rows of the indices that this part owns.

        order : int64, shape (n,), from ``resolve``
        grads : of the accumulator's dtype, shape (n, dim), rows contiguous
        part, num_parts : this call's share; all parts together add every row once
        """
        self._check(grads, order.shape[0])
        if self.dtype == np.float32:
            fold_array[float](order, grads, self._sums, part, num_parts)
        else:
            fold_array[double](order, grads, self._sums, part, num_parts)

    def add(self, const id_t[::1] ids not None, grads not None, index_t frame):  # IN
        """``resolve`` and ``fold`` on one thread. Nothing is counted when shape or dtype disagree."""
        self._check(grads, ids.shape[0])
        self.fold(self.resolve(ids, frame), grads)

    def _check(self, grads, Py_ssize_t num_rows):
        if grads.shape != (num_rows, self.dim):
            raise ValueError(f"grads: expected shape ({num_rows}, {self.dim}), got {grads.shape}")
        if grads.dtype != self.dtype:
            raise ValueError(f"grads: expected {self.dtype}, got {grads.dtype}")

    def drain(self, bint mean=False, bint ascending=False):
        """Hand over what has been summed and start anew.

        mean : divide each row by its dtype(number of frames that contained it)
        ascending : by id instead of by first appearance, which costs a sort and a copy
        Returns ids int64 (n,), sums (n, dim), counts int64 (n,). The arrays are the caller's: they
        are never written again from here. Where memory for them fails, nothing has changed.
        """
        n = self.table.num_ids
        ids, counts, sums = self._ids[:n], self._counts[:n], self._sums[:n]
        if ascending:
            order = np.argsort(ids)
            ids, counts, sums = ids[order], counts[order], np.take(sums, order, axis=0)
        if mean and n:
            if self.dtype == np.float32:
                divide_rows[float](sums, counts)
            else:
                divide_rows[double](sums, counts)
        table_clear(&self.table)
        # What was copied out may be filled again, unless it is far more than was needed now.
        if not ascending or self._sums.shape[0] > ROOMY * n:
            self._start()
        return ids, sums, counts

    def held(self):
        """The ids not drained and the number of the frame that each occurred in last: int64 (n,) both, copies."""
        n = self.table.num_ids
        return self._ids[:n].copy(), self._frames[:n].copy()

    def get_state(self):
        """What has been summed and not drained, as arrays that are copies."""
        n = self.table.num_ids
        return {"ids": self._ids[:n].copy(), "sums": self._sums[:n].copy(),
                "counts": self._counts[:n].copy(), "frames": self._frames[:n].copy()}

    def set_state(self, state):
        """Take up what ``get_state`` gave; what is held now is dropped."""
        cdef bint is_new
        cdef id_t[::1] ids = np.array(state["ids"], np.int64)
        cdef Py_ssize_t i, n = ids.shape[0]
        sums = np.array(state["sums"], self.dtype)
        if sums.shape != (n, self.dim):
            raise ValueError(f"sums: expected shape ({n}, {self.dim}), got {sums.shape}")
        table_clear(&self.table)
        table_reserve(&self.table, n)
        for i in range(n):
            table_insert(&self.table, ids[i], &is_new)
            if not is_new:
                raise ValueError(f"id {ids[i]} occurs twice in the state")
        self._ids, self._sums = np.asarray(ids), sums
        self._counts, self._frames = np.array(state["counts"], np.int64), np.array(state["frames"], np.int64)


def grown(array, used, room):
    """array with at least room rows, of which the first used are kept: doubled, so that growth is linear in all."""
    if array.shape[0] >= room:
        return array
    bigger = np.empty((max(room, 2 * array.shape[0]), *array.shape[1:]), array.dtype)
    bigger[:used] = array[:used]
    return bigger


cdef int fold_array(const index_t[::1] order, const real_t[:, ::1] grads, real_t[:, ::1] sums,
                    index_t part, index_t num_parts) except -1:
    if order.shape[0] == 0:
        return 0
    with nogil:
        fold_rows(&order[0], order.shape[0], &grads[0, 0], grads.strides[0], &sums[0, 0], sums.shape[1],
                  part, num_parts)
    return 0


cdef void fold_rows(const index_t* order, Py_ssize_t n, const real_t* grads, Py_ssize_t stride, real_t* sums,
                    Py_ssize_t dim, index_t part, index_t num_parts) noexcept nogil:
    cdef Py_ssize_t i, c
    cdef index_t index
    cdef bint is_new
    cdef const real_t* row
    cdef real_t* into
    for i in range(n):
        if i + AHEAD < n:
            index = order[i + AHEAD]
            prefetch(sums + (~index if index < 0 else index) * dim)
        index = order[i]
        is_new = index < 0
        if is_new:
            index = ~index
        if num_parts > 1 and (index // BLOCK) % num_parts != part:
            continue
        row = <const real_t*>(<const char*>grads + i * stride)
        into = sums + index * dim
        if is_new:
            # A copy, not 0 + row: that would turn -0.0 into 0.0.
            memcpy(into, row, dim * sizeof(real_t))
        else:
            for c in range(dim):
                into[c] = into[c] + row[c]


cdef int divide_rows(real_t[:, ::1] sums, const index_t[::1] counts) except -1:
    cdef Py_ssize_t i, c
    cdef real_t count
    with nogil:
        for i in range(sums.shape[0]):
            count = <real_t>counts[i]
            for c in range(sums.shape[1]):
                sums[i, c] = sums[i, c] / count
    return 0
