# Blocks of memory that outlive the kernel that filled them, and return to their pool with their last reference.
cdef extern from "pages.h":
    void* penstock_allocate(size_t size) noexcept nogil
    void* penstock_allocate_zeroed(size_t size) noexcept nogil
    void penstock_release(void* memory, size_t size) noexcept nogil


cdef enum:
    MAX_FREE_BLOCKS = 16      # that a pool keeps at most: those of a few frames


cdef struct FreeBlock:
    char* memory
    Py_ssize_t size, touched  # touched: bytes from the start that were ever written


cdef class Pool:
    cdef FreeBlock[MAX_FREE_BLOCKS] _free
    cdef int _num_free
    cdef Py_ssize_t _wanted   # bytes of the recent need: a block that is far larger is freed
    cdef Block take(self, Py_ssize_t num_bytes)
    cdef void give_back(self, Block block) noexcept
    cdef Py_ssize_t touched_bytes(self) noexcept


cdef class Block:
    cdef char* memory         # 64-byte aligned; where it is large, pages that were never written take no memory
    cdef Py_ssize_t size
    cdef Py_ssize_t used             # bytes from the start that its present owner has written
    cdef Py_ssize_t touched          # bytes from the start that earlier owners have written
    cdef Pool pool
    cpdef array(self, dtype, Py_ssize_t num_rows, Py_ssize_t width=*, Py_ssize_t first=*)


cdef class Sums:
    cdef Block id_block, sum_block   # None where there are no ids
    cdef Block row_block             # None also where rows are not counted
    cdef bint counts_rows
    cdef Py_ssize_t first            # where they begin in the blocks, which other Sums share
    cdef readonly Py_ssize_t num_ids, dim
    cdef object dtype, _id_array, _sum_array
