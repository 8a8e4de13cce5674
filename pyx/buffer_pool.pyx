"""Memory for sums: aligned to 64 bytes, in huge pages if a block is large, and reused from step to step.

A drain hands over the sums of a step without a copy, and the next step fills another block. A block returns to
its pool when the last array on it is gone, so an update that still reads a block keeps it. Blocks are reused
because new memory costs as much as the sums themselves: the system has to clear each of its pages.
"""

import numpy as np

cimport cython
from cpython.buffer cimport PyBUF_FORMAT

cdef char* BYTES = "B"

cdef enum:
    MAX_OVERSIZE = 8  # free a returned block if its touched bytes exceed this many times the recent need


# A Block refers to its Pool, and a Pool to no object, so that no reference cycle contains them. The deallocation of a
# Block uses its pool, so the garbage collector must not clear either of them.
@cython.no_gc
cdef class Pool:
    """Free blocks, which ``take`` reuses. The caller of a method holds the GIL."""

    def __dealloc__(self):
        cdef int i
        for i in range(self._num_free):
            penstock_release(self._free[i].memory, self._free[i].size)

    cdef Py_ssize_t touched_bytes(self) noexcept:
        """Return the bytes of the free blocks that were ever written: the memory that they occupy."""
        cdef int i
        cdef Py_ssize_t n = 0
        for i in range(self._num_free):
            n += self._free[i].touched
        return n

    cdef Block take(self, Py_ssize_t num_bytes):
        """Return a block of at least ``num_bytes`` bytes, with undefined contents. Raises MemoryError."""
        cdef Block block = Block.__new__(Block)
        cdef Py_ssize_t size
        cdef int i, best = -1
        for i in range(self._num_free):
            # The smallest block that fits: if ids took the block of the sums, the sums would need a new one.
            if self._free[i].size >= num_bytes and (best < 0 or self._free[i].size < self._free[best].size):
                best = i
        if best >= 0:
            block.memory, block.size = self._free[best].memory, self._free[best].size
            block.touched, block.pool = self._free[best].touched, self
            self._num_free -= 1
            self._free[best] = self._free[self._num_free]
            return block
        # 1.5 times the need, in whole pages, so that a need that grows slowly does not allocate in every step.
        size = (max(num_bytes + num_bytes // 2, 4096) + 4095) // 4096 * 4096
        block.memory = <char*>penstock_allocate(size)
        if block.memory == NULL:
            raise MemoryError(f"cannot allocate {size} bytes for sums")
        block.size, block.pool = size, self
        return block

    cdef void give_back(self, Block block) noexcept:
        """Keep the memory of a block for reuse; free it if the pool is full, or if the block is far too large."""
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
    """Memory as a writable buffer of bytes, shape (size,). Its deallocation returns the memory to the pool."""

    def __dealloc__(self):
        if self.memory != NULL and self.pool is not None:
            self.pool.give_back(self)

    def __getbuffer__(self, Py_buffer* view, int flags):
        view.buf, view.obj, view.len, view.readonly = self.memory, self, self.size, 0
        view.itemsize, view.ndim, view.format = 1, 1, BYTES if flags & PyBUF_FORMAT else NULL
        view.shape, view.strides = &self.size, &view.itemsize
        view.suboffsets, view.internal = NULL, NULL

    cpdef array(self, dtype, Py_ssize_t num_rows, Py_ssize_t width=0, Py_ssize_t first=0):
        """Return rows of the block from ``first`` on, shape (num_rows,) if width is 0, else (num_rows, width).

        The array keeps the block alive.
        """
        cdef Py_ssize_t each = max(width, <Py_ssize_t>1), begin = first * each, count = num_rows * each
        flat = np.frombuffer(self, dtype, begin + count)[begin:] if count else np.empty(0, dtype)
        return flat.reshape(num_rows, width) if width else flat


cdef class Sums:
    """Distinct ids and one sum per id, as a drain hands them over. The arrays are created on first access.

    num_ids : number of ids; dim : floats per sum
    Unpacks to ids, int64 (num_ids,), and sums, float32 or float64 (num_ids, dim).
    """

    @property
    def ids(self):
        if self._id_array is None:
            self._id_array = (
                self.id_block.array(np.int64, self.num_ids, 0, self.first) if self.num_ids else np.empty(0, np.int64))
        return self._id_array

    @property
    def rows(self):
        """The number of gradient rows of each id, int64 (num_ids,); None if they were not counted."""
        if self.row_block is None:
            return np.empty(0, np.int64) if self.counts_rows else None
        return self.row_block.array(np.int64, self.num_ids, 0, self.first)

    @property
    def sums(self):
        if self._sum_array is None:
            if self.num_ids and self.dim:
                self._sum_array = self.sum_block.array(self.dtype, self.num_ids, self.dim, self.first)
            else:
                self._sum_array = np.empty((self.num_ids, self.dim), self.dtype)
        return self._sum_array

    @property
    def nbytes(self):
        """Bytes of ids and sums."""
        return self.num_ids * (8 + self.dim * self.dtype.itemsize)

    def __iter__(self):
        return iter((self.ids, self.sums))
