"""Memory for sums: aligned, in huge pages where it is large, and used again.

A step's sums are handed over, not copied, and the next step fills another block. When the last array
that looks into a block is gone, the block returns to its pool: an update that still reads it keeps it,
and pages that the system has cleared once are not asked for anew in every step (which costs as much as
the sums themselves).
"""

import numpy as np

cimport cython
from cpython.buffer cimport PyBUF_FORMAT

from ._types cimport index_t, real_t

cdef char* BYTES = "B"

cdef enum:
    MAX_OVERSIZE = 8  # free a returned block if more than this many times the recent need was ever written to it


# Neither type can be in a reference cycle, and deallocating one uses the other: the collector must not clear them.
@cython.no_gc
cdef class Pool:
    """Blocks to be used again. Used under the GIL."""

    def __dealloc__(self):
        cdef int i
        for i in range(self._num_free):
            penstock_release(self._free[i].memory, self._free[i].size)

    cdef Py_ssize_t touched_bytes(self) noexcept:
        """Bytes of the blocks to be used again."""
        cdef int i
        cdef Py_ssize_t n = 0
        for i in range(self._num_free):
            n += self._free[i].touched
        return n

    cdef Block take(self, Py_ssize_t num_bytes):
        """A block of at least num_bytes, its contents undefined. Raises MemoryError."""
        cdef Block block = Block.__new__(Block)
        cdef Py_ssize_t size
        cdef int i, best = -1
        for i in range(self._num_free):
            # The smallest that will do: ids must not take the room of sums, or sums would be new in every step.
            if self._free[i].size >= num_bytes and (best < 0 or self._free[i].size < self._free[best].size):
                best = i
        if best >= 0:
            block.memory, block.size = self._free[best].memory, self._free[best].size
            block.touched, block.pool = self._free[best].touched, self
            self._num_free -= 1
            self._free[best] = self._free[self._num_free]
            return block
        # Half as much again: a need that grows by a little in every step does not allocate in every step.
        size = (max(num_bytes + num_bytes // 2, 4096) + 4095) // 4096 * 4096
        block.memory = <char*>penstock_allocate(size)
        if block.memory == NULL:
            raise MemoryError(f"cannot allocate {size} bytes for sums")
        block.size, block.pool = size, self
        return block

    cdef void give_back(self, Block block) noexcept:
        cdef FreeBlock free
        free.memory, free.size, free.touched = block.memory, block.size, max(block.touched, block.used)
        self._wanted = max(block.used, self._wanted // 2)
        if self._num_free < MAX_FREE_BLOCKS and free.touched <= MAX_OVERSIZE * max(self._wanted, <Py_ssize_t>4096):
            self._free[self._num_free] = free
            self._num_free += 1
        else:
            penstock_release(free.memory, free.size)


@cython.no_gc
cdef class Block:
    """Some memory; read and written through the buffer protocol."""

    def __dealloc__(self):
        if self.memory != NULL and self.pool is not None:
            self.pool.give_back(self)

    def __getbuffer__(self, Py_buffer* view, int flags):
        view.buf, view.obj, view.len, view.readonly = self.memory, self, self.size, 0
        view.itemsize, view.ndim, view.format = 1, 1, BYTES if flags & PyBUF_FORMAT else NULL
        view.shape, view.strides = &self.size, &view.itemsize
        view.suboffsets, view.internal = NULL, NULL

    cpdef array(self, dtype, Py_ssize_t num_rows, Py_ssize_t width=0):
        """The start of the block as an array (num_rows,), or (num_rows, width), which keeps the block alive."""
        cdef Py_ssize_t count = num_rows * max(width, <Py_ssize_t>1)
        flat = np.frombuffer(self, dtype, count) if count else np.empty(0, dtype)
        return flat.reshape(num_rows, width) if width else flat


cdef class Sums:
    """Ids with a sum each, as a drain handed them over; the arrays are created on demand.

    num_ids : how many; dim : floats per sum. Unpacks to ids int64 (num_ids,), sums (num_ids, dim)
    """

    @property
    def ids(self):
        if self._id_array is None:
            self._id_array = self.id_block.array(np.int64, self.num_ids) if self.num_ids else np.empty(0, np.int64)
        return self._id_array

    @property
    def rows(self):
        """How many rows each id has: int64 (num_ids,); None if they were not counted."""
        if self.row_block is None:
            return np.empty(0, np.int64) if self.counts_rows else None
        return self.row_block.array(np.int64, self.num_ids)

    @property
    def sums(self):
        if self._sum_array is None:
            if self.num_ids and self.dim:
                self._sum_array = self.sum_block.array(self.dtype, self.num_ids, self.dim)
            else:
                self._sum_array = np.empty((self.num_ids, self.dim), self.dtype)
        return self._sum_array

    @property
    def nbytes(self):
        """Bytes of both."""
        return self.num_ids * (8 + self.dim * self.dtype.itemsize)

    def __iter__(self):
        return iter((self.ids, self.sums))


def divide(real_t[:, ::1] sums not None, const index_t[:] counts not None):
    """Each row by dtype(its count), in place. sums (n, dim), counts int64 (n,)."""
    # Not by NumPy: a division that finds no room for NumPy's buffers ends the process.
    cdef Py_ssize_t i, c
    for i in range(sums.shape[0]):
        for c in range(sums.shape[1]):
            sums[i, c] /= <real_t>counts[i]
