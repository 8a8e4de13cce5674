"""Memory for sums: aligned, in huge pages where it is large, and used again.

A step's sums are handed over, not copied, and the next step fills another block. When the last array
that looks into a block is gone, the block returns to its pool: an update that still reads it keeps it,
and pages that the system has cleared once are not asked for anew in every step (which costs as much as
the sums themselves).
"""

import numpy as np

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free

cdef enum:
    KEPT = 4    # blocks a pool holds: as many steps as may be under way
    ROOMY = 8   # a block is kept while it is at most this many times what was needed of late


cdef class Pool:
    """Blocks to be used again. Used under the GIL."""

    def __cinit__(self):
        self._free = []
        self._wanted = 0

    def __dealloc__(self):
        for address, size, _ in self._free:
            penstock_release(<void*><uintptr_t>address, size)

    @property
    def nbytes(self):
        """Bytes that wait here."""
        return sum(touched for _, _, touched in self._free)

    cdef Block take(self, Py_ssize_t num_bytes):
        """A block of at least num_bytes, its contents undefined. Raises MemoryError."""
        cdef Block block = Block.__new__(Block)
        cdef Py_ssize_t size
        for at, (address, size, touched) in enumerate(self._free):
            if size >= num_bytes:
                block.memory, block.size, block.touched, block.pool = <char*><uintptr_t>address, size, touched, self
                del self._free[at]
                return block
        # Half as much again: a need that grows by a little in every step does not allocate in every step.
        size = (max(num_bytes + num_bytes // 2, 4096) + 4095) // 4096 * 4096
        block.memory = <char*>penstock_allocate(size)
        if block.memory == NULL:
            raise MemoryError(f"cannot allocate {size} bytes for sums")
        block.size, block.pool = size, self
        return block

    cdef int give_back(self, Block block) except -1:
        block.touched = max(block.touched, block.used)
        self._wanted = max(block.used, self._wanted // 2)
        if len(self._free) < KEPT and block.touched <= ROOMY * max(self._wanted, 4096):
            self._free.append((<uintptr_t>block.memory, block.size, block.touched))
        else:
            penstock_release(block.memory, block.size)
        return 0


@cython.no_gc_clear  # its pool must be there when it goes
cdef class Block:
    """Some memory; read and written through the buffer protocol."""

    def __dealloc__(self):
        if self.memory != NULL:
            if self.pool is not None:
                self.pool.give_back(self)
            else:
                penstock_release(self.memory, self.size)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 0, flags)

    def array(self, dtype, shape):
        """The start of the block as an array, which keeps it alive."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self, dtype, count).reshape(shape) if count else np.empty(shape, dtype)
