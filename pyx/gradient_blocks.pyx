"""The rows of a frame, or of several, on their way into an accumulator: where they lie, looked up once under the GIL."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from libc.stdlib cimport free, realloc
from libc.string cimport strchr

from ._types cimport id_t, index_t
from .coalesce cimport Source


cdef class GradientBlocks:
    """Sources for code without Python, and what keeps their memory.

    dim : of the rows
    """

    def __cinit__(self, Py_ssize_t dim):
        self.dim, self.owners = dim, []

    def __dealloc__(self):
        free(self.sources)
        free(self.starts)

    def __len__(self):
        return self.num_sources

    @property
    def num_rows(self):
        return self.starts[self.num_sources] if self.num_sources else 0

    def block_at(self, index_t row):
        """Return the number of the block that has a row, and the rows before it."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"expected one of {self.num_rows} rows, got {row}")
        cdef Py_ssize_t number = self.block_of(row)
        return number, self.starts[number]

    def addresses(self, Py_ssize_t number):
        """Return where the ids and the gradients of a block begin, and how many rows it has."""
        if not 0 <= number < self.num_sources:
            raise IndexError(f"expected one of {self.num_sources} blocks, got {number}")
        cdef Source* source = &self.sources[number]
        return <size_t>source.ids, <size_t>source.rows, source.num_rows

    def span(self, index_t start, index_t stop):
        """Return some of the rows, which lie in whole blocks, but the first and the last one. They are not copied."""
        cdef GradientBlocks part = GradientBlocks.__new__(GradientBlocks, self.dim)
        cdef Source* source
        cdef index_t begin, end
        cdef Py_ssize_t i
        if not 0 <= start < stop <= self.num_rows:
            raise IndexError(f"expected some of {self.num_rows} rows, got {start} to {stop}")
        part.owners = self.owners
        i = self.block_of(start)
        part.reserve(self.block_of(stop - 1) + 1 - i)
        while i < self.num_sources and self.starts[i] < stop:
            source, begin, end = &self.sources[i], max(start, self.starts[i]), min(stop, self.starts[i + 1])
            begin, end, i = begin - self.starts[i], end - self.starts[i], i + 1
            part.add(source.ids + begin, source.rows + begin * source.stride, source.stride, end - begin)
        return part

    @staticmethod
    def joined(several):
        """Return the blocks of several, one after the other; all have the same dim."""
        cdef GradientBlocks part, whole = GradientBlocks.__new__(GradientBlocks, several[0].dim)
        cdef Py_ssize_t i
        for part in several:
            if part.dim != whole.dim:
                raise ValueError(f"expected rows of dim {whole.dim}, got {part.dim}")
            whole.reserve(part.num_sources)
            for i in range(part.num_sources):
                whole.add(part.sources[i].ids, part.sources[i].rows, part.sources[i].stride, part.sources[i].num_rows)
            whole.owners += part.owners
        return whole

    @staticmethod
    def of_arrays(blocks):
        """Return blocks of (ids, grads): int64 (n,), float32 (n, dim). Raises ValueError for others."""
        return blocks_of([(ids, grads, None, None) for ids, grads in blocks], blocks[0][1].shape[1], False)

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        """Make room for so many more blocks."""
        cdef Py_ssize_t room = self.num_sources + num_more
        if room <= self.room:
            return 0
        room = max(room, 2 * self.room)
        cdef void* sources = realloc(self.sources, room * sizeof(Source))
        if sources != NULL:
            self.sources = <Source*>sources
        cdef void* starts = realloc(self.starts, (room + 1) * sizeof(index_t))
        if starts != NULL:
            self.starts = <index_t*>starts
        if sources == NULL or starts == NULL:
            raise MemoryError(f"cannot allocate {room * (sizeof(Source) + sizeof(index_t))} bytes for blocks")
        self.starts[0], self.room = 0, room
        return 0

    cdef void add(self, const id_t* ids, const char* rows, Py_ssize_t stride, Py_ssize_t num_rows) noexcept:
        """Add a block, for which there is room, of at least one row."""
        cdef Source* source = &self.sources[self.num_sources]
        source.ids, source.rows, source.stride, source.num_rows = ids, rows, stride, num_rows
        source.row_index, source.scales = NULL, NULL
        self.starts[self.num_sources + 1] = self.starts[self.num_sources] + num_rows
        self.num_sources += 1

    cdef Py_ssize_t block_of(self, index_t row) noexcept nogil:
        cdef Py_ssize_t low = 0, high = self.num_sources, middle
        while high - low > 1:
            middle = (low + high) // 2
            if self.starts[middle] <= row:
                low = middle
            else:
                high = middle
        return low


cdef GradientBlocks blocks_of(blocks, Py_ssize_t dim, bint wide):
    """Return the blocks of some arrays, which they keep.

    blocks : (ids, grads, which, gains) each, as ``Intake.begin`` describes them; dim, wide : rows of so many float64, else float32
    Raises ValueError or MemoryError.
    """
    cdef GradientBlocks whole = GradientBlocks.__new__(GradientBlocks, dim)
    cdef Source source
    whole.wide = wide
    whole.reserve(len(blocks))
    for block in blocks:
        ids, grads, which, gains = block
        if not point(&source, ids, grads, which, gains, dim, wide):
            got = ", ".join(f"{array.dtype} {array.shape}" for array in block if array is not None)
            raise ValueError(f"expected aligned arrays with contiguous rows: ids and which int64 (n,), grads float"
                             f"{64 if wide else 32} (n, {dim}), gains float32 (n,), not of float64; got {got}")
        if source.num_rows:
            whole.add(source.ids, source.rows, source.stride, source.num_rows)
            whole.sources[whole.num_sources - 1] = source
            whole.owners.append(block)
    return whole


cdef bint point(Source* s, ids, grads, which, gains, Py_ssize_t dim, bint wide) except -1:
    """Where the rows of a block lie. False where its arrays are not what is summed."""
    cdef Py_buffer view
    cdef bint fits
    cdef Py_ssize_t num_grads, itemsize = sizeof(double) if wide else sizeof(float)
    s.ids = <const id_t*>row_of_numbers(ids, b"lq", sizeof(id_t), &s.num_rows)
    if s.ids == NULL:
        return False
    PyObject_GetBuffer(grads, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    fits = (view.ndim == 2 and view.itemsize == itemsize and is_of(&view, b"d" if wide else b"f")
            and view.shape[1] == dim)
    if fits:
        s.rows, s.stride, num_grads = <const char*>view.buf, view.strides[0], view.shape[0]
        fits = s.num_rows == 0 or (
            (dim == 1 or view.strides[1] == itemsize)
            and (<size_t>s.rows | <size_t>s.stride) % itemsize == 0)
    PyBuffer_Release(&view)
    s.row_index, s.scales = NULL, NULL
    if which is not None:
        s.row_index = <const index_t*>row_of_numbers(which, b"lq", sizeof(index_t), &num_grads)
        fits = fits and s.row_index != NULL
    fits = fits and num_grads == s.num_rows
    if gains is not None:
        s.scales = <const float*>row_of_numbers(gains, b"f", sizeof(float), &num_grads)
        fits = fits and s.scales != NULL and num_grads == s.num_rows and not wide
    return fits


cdef const void* row_of_numbers(array, const char* kinds, Py_ssize_t itemsize, Py_ssize_t* num) except? NULL:
    """Where the numbers of an array begin that lie one after the other and aligned, and how many; NULL where not so.

    Who keeps the array keeps that.
    """
    cdef Py_buffer view
    cdef void* begin = NULL
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    if (view.ndim == 1 and view.itemsize == itemsize and is_of(&view, kinds) and <size_t>view.buf % itemsize == 0
            and (view.shape[0] <= 1 or view.strides[0] == itemsize)):
        # The address of an empty array may be NULL; it is never read.
        begin, num[0] = view.buf if view.shape[0] else <void*>num, view.shape[0]
    PyBuffer_Release(&view)
    return begin


cdef bint is_of(const Py_buffer* view, const char* kinds) noexcept:
    """Whether the elements are of one of these kinds, in this machine's byte order: another one has a sign before."""
    return view.format != NULL and view.format[1] == 0 and strchr(kinds, view.format[0]) != NULL
