"""Plain record batches, read where they lie: through Arrow's C data interface, or from the messages of Arrow IPC.

A batch of pyarrow takes longer to create than a hundred rows to sum. The C data interface gives pointers. It does not
say how large the buffers are: a batch has been validated before it comes here. Messages need no pyarrow at all where
they equal one that it has read, but for lengths and offsets: ``RepeatedMessages`` validates those. Batches of several
tables become ``CodedRows``, all others ``PlainRows``.
"""

import numpy as np

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from ._types cimport id_t, index_t
from .buffer_pool cimport Block, Pool
from .coded_rows cimport CodedRows
from .gradient_blocks cimport GradientBlocks


cdef enum:
    COPIED_ALONE = 1 << 16      # bytes that are copied without the interpreter's lock
    LINE = 64


cdef struct ArrowArray:         # Arrow's own, as its specification has it
    int64_t length, null_count, offset, n_buffers, n_children
    const void** buffers
    ArrowArray** children
    ArrowArray* dictionary
    void (*release)(ArrowArray*) noexcept
    void* private_data


cdef struct Columns:            # of one batch; rows, steps : NULL: not read
    const char* ids
    const char* rows
    const char* steps
    const char* codes           # of several tables; NULL: of one
    const char* offsets         # of lists of values in ``rows``; NULL: all have the same length
    int64_t num_rows, num_values


cdef class PlainRows:
    """The rows of neighbouring batches, at least one, as frames take them.

    blocks : a block for each batch; bounds : int64 (pieces + 1,), where the step changes, or a batch ends
    steps : int64 (pieces,); None: there are none
    are_own : whether they are copies, which nobody else knows
    """
    cdef readonly GradientBlocks blocks
    cdef readonly bint are_own
    cdef readonly object bounds, steps
    cdef list block_steps       # of each block, the address of its steps

    def __cinit__(self, Py_ssize_t width):
        self.blocks, self.block_steps = GradientBlocks(width), []

    cdef int add(self, const Columns* columns) except -1:
        self.blocks.reserve(1)
        if columns.steps != NULL:
            self.block_steps.append(<size_t>columns.steps)
        self.blocks.add(<const id_t*>columns.ids, columns.rows, self.blocks.dim * sizeof(float), columns.num_rows)
        return 0

    cdef bint continues(self, const Columns* columns) except -1:
        """Whether the first step of a batch is the last one so far."""
        cdef Py_ssize_t last = self.blocks.num_sources - 1
        if last < 0 or columns.steps == NULL:
            return False
        cdef const id_t* steps = <const id_t*><size_t>self.block_steps[last]
        return steps[self.blocks.sources[last].num_rows - 1] == (<const id_t*>columns.steps)[0]

    cdef int find_pieces(self) except -1:
        """Find where the step changes, of all batches that were added."""
        cdef GradientBlocks blocks = self.blocks
        cdef bint has_steps = bool(self.block_steps)
        cdef Py_ssize_t room = blocks.num_rows if has_steps else blocks.num_sources, i, k, num_pieces = 0
        cdef index_t[::1] bounds
        cdef id_t[::1] steps
        cdef const id_t* values
        bounds_array, steps_array = np.empty(room + 1, np.int64), np.empty(room if has_steps else 0, np.int64)
        bounds, steps = bounds_array, steps_array
        if not has_steps:
            memcpy(&bounds[0], blocks.starts, (room + 1) * sizeof(index_t))
            self.bounds = bounds_array
            return 0
        for i in range(blocks.num_sources):
            values = <const id_t*><size_t>self.block_steps[i]
            with nogil:
                for k in range(blocks.sources[i].num_rows):
                    if k == 0 or values[k] != values[k - 1]:
                        bounds[num_pieces], steps[num_pieces] = blocks.starts[i] + k, values[k]
                        num_pieces += 1
        bounds[num_pieces] = blocks.num_rows
        self.bounds, self.steps = bounds_array[:num_pieces + 1], steps_array[:num_pieces]
        return 0


def plain_rows(batch not None, Pool pool not None, Py_ssize_t num_columns, Py_ssize_t id_at, Py_ssize_t gradient_at,
               Py_ssize_t step_at, Py_ssize_t width):
    """Return the rows of a batch; None where something is null, or not as it should be.

    batch : what its ``__arrow_c_array__`` gave second; valid, of num_columns columns
    pool : of memory for copies of columns that are not aligned, as those of messages of gRPC
    id_at, step_at : columns of int64, step_at -1 for none; gradient_at : one of lists of width float32, -1 for none
    """
    cdef ArrowArray* whole = <ArrowArray*>PyCapsule_GetPointer(batch, "arrow_array")
    cdef ArrowArray* lists
    cdef Columns columns
    cdef PlainRows rows
    columns.rows, columns.steps, columns.codes, columns.offsets = NULL, NULL, NULL, NULL
    columns.num_rows, columns.num_values = whole.length, 0
    if whole.release == NULL or whole.n_children != num_columns or whole.offset != 0 or has_null(whole):
        return None
    if not (0 <= id_at < num_columns and -1 <= gradient_at < num_columns and -1 <= step_at < num_columns):
        return None
    if whole.length < 1 or not points(&columns.ids, whole.children[id_at], whole.length, 0, whole.length, 8):
        return None
    if gradient_at >= 0:
        lists = whole.children[gradient_at]
        if lists.n_children != 1 or lists.length != whole.length or has_null(lists):
            return None
        columns.num_values = whole.length * width
        if not points(&columns.rows, lists.children[0], -1, lists.offset * width, columns.num_values, 4):
            return None
    if step_at >= 0 and not points(&columns.steps, whole.children[step_at], whole.length, 0, whole.length, 8):
        return None
    rows = PlainRows.__new__(PlainRows, width if gradient_at >= 0 else 0)
    owner = aligned(&columns, 0, 0, pool, batch)
    rows.are_own = owner is not batch
    rows.add(&columns)
    rows.blocks.owners.append(owner)
    rows.find_pieces()
    return rows

def coded_rows(batch not None, Pool pool not None, Py_ssize_t num_columns, Py_ssize_t table_at, Py_ssize_t code_bytes,
               Py_ssize_t id_at, Py_ssize_t gradient_at, Py_ssize_t width, Py_ssize_t offset_bytes, Py_ssize_t step_at):
    """Return the rows of a batch of several tables; None where something is null.

    batch, pool, num_columns, id_at, step_at : as of ``plain_rows``
    table_at : the column of the dictionary, whose codes have so many bytes
    gradient_at : a column of float32 in lists, of ``width`` each, or (0) with offsets of so many bytes
    Returns them, and what no two dictionaries that exist at one time have in common.
    """
    cdef ArrowArray* whole = <ArrowArray*>PyCapsule_GetPointer(batch, "arrow_array")
    cdef ArrowArray* lists
    cdef ArrowArray* names
    cdef Columns columns
    cdef int64_t n = whole.length, first = 0
    columns.steps, columns.offsets, columns.num_rows = NULL, NULL, n
    if whole.release == NULL or whole.n_children != num_columns or whole.offset != 0 or has_null(whole) or n < 1:
        return None
    if not (0 <= table_at < num_columns and 0 <= id_at < num_columns and 0 <= gradient_at < num_columns
            and -1 <= step_at < num_columns):
        return None
    names, lists = whole.children[table_at].dictionary, whole.children[gradient_at]
    if names == NULL or names.n_children or not points(&columns.codes, whole.children[table_at], n, 0, n, code_bytes):
        return None
    if not points(&columns.ids, whole.children[id_at], n, 0, n, 8):
        return None
    if step_at >= 0 and not points(&columns.steps, whole.children[step_at], n, 0, n, 8):
        return None
    if lists.n_children != 1 or lists.length != n or has_null(lists):
        return None
    if width:
        first, columns.num_values = lists.offset * width, n * width
    else:
        if lists.n_buffers != 2 or lists.buffers[1] == NULL:
            return None
        columns.offsets = <const char*>lists.buffers[1] + lists.offset * offset_bytes
        columns.num_values = lists.children[0].length
    if not points(&columns.rows, lists.children[0], -1, first, columns.num_values, 4):
        return None
    identity = names.length, names.offset, *[<size_t>names.buffers[i] for i in range(names.n_buffers)]
    owner = aligned(&columns, code_bytes, offset_bytes, pool, batch)
    return coded_rows_of(&columns, code_bytes, width, offset_bytes, owner), identity


cdef CodedRows coded_rows_of(const Columns* columns, Py_ssize_t code_bytes, Py_ssize_t width, Py_ssize_t offset_bytes,
                             owner):
    cdef CodedRows rows = CodedRows.__new__(CodedRows)
    rows.codes, rows.ids, rows.offsets = columns.codes, columns.ids, columns.offsets
    rows.values, rows.steps, rows.owner = columns.rows, columns.steps, owner
    rows.code_bytes, rows.offset_bytes, rows.width = code_bytes, offset_bytes, width
    rows.num_rows, rows.num_values = columns.num_rows, columns.num_values
    return rows


cdef bint points(const char** begin, const ArrowArray* column, int64_t length, int64_t first, int64_t num,
                 Py_ssize_t itemsize) noexcept:
    """Whether a column has numbers from ``first`` on, none of them null. begin : OUT the first one

    length : of the column, -1: any
    """
    if column.n_buffers != 2 or column.n_children or first + num > column.length or has_null(column):
        return False
    begin[0] = <const char*>column.buffers[1] + (column.offset + first) * itemsize
    return column.buffers[1] != NULL and length in (-1, column.length)


cdef aligned(Columns* columns, Py_ssize_t code_bytes, Py_ssize_t offset_bytes, Pool pool, batch):
    """Return what keeps the memory of columns: the batch, or a block with copies of them, if one is not aligned."""
    cdef const char** begins[5]
    cdef Py_ssize_t sizes[5]
    cdef Py_ssize_t i, num_bytes = 0
    cdef Block block
    begins[0], begins[1], begins[2] = &columns.ids, &columns.steps, &columns.rows
    begins[3], begins[4] = &columns.codes, &columns.offsets
    sizes[0] = sizes[1] = columns.num_rows * sizeof(id_t)
    sizes[2], sizes[3] = columns.num_values * sizeof(float), columns.num_rows * code_bytes
    sizes[4] = (columns.num_rows + 1) * offset_bytes
    # The address of a column that is not there is 0.
    if not ((<size_t>columns.ids | <size_t>columns.steps) % sizeof(id_t) or <size_t>columns.rows % sizeof(float)
            or code_bytes and <size_t>columns.codes % code_bytes
            or offset_bytes and <size_t>columns.offsets % offset_bytes):
        return batch
    for i in range(5):
        sizes[i] = 0 if begins[i][0] == NULL else sizes[i]
        num_bytes += in_lines(sizes[i])
    block = pool.take(num_bytes)
    block.used = num_bytes
    if num_bytes < COPIED_ALONE:
        move(begins, sizes, block.memory)
    else:
        with nogil:
            move(begins, sizes, block.memory)
    return block


cdef void move(const char*** begins, const Py_ssize_t* sizes, char* place) noexcept nogil:
    """Copy columns to a place, and let them begin there."""
    cdef Py_ssize_t i
    for i in range(5):
        if sizes[i]:
            memcpy(place, begins[i][0], sizes[i])
            begins[i][0] = place
            place += in_lines(sizes[i])


cdef Py_ssize_t in_lines(Py_ssize_t num_bytes) noexcept nogil:
    """The bytes of whole cache lines that have room for so many."""
    return (num_bytes + LINE - 1) // LINE * LINE


cdef bint has_null(const ArrowArray* array) noexcept nogil:
    """Whether a bit of its bitmap is not set, whatever it says of their number."""
    cdef const uint8_t* bits
    cdef int64_t bit, end = array.offset + array.length
    if array.n_buffers < 1 or array.buffers[0] == NULL:
        return False
    bits, bit = <const uint8_t*>array.buffers[0], array.offset
    while bit < end:
        if bit % 8 == 0 and bit + 8 <= end:
            if bits[bit // 8] != 255:
                return True
            bit += 8
        else:
            if not bits[bit // 8] >> (bit % 8) & 1:
                return True
            bit += 1
    return False


cdef class RepeatedMessages:
    """Reads messages of record batches that equal a first one up to their bodies, but for the numbers in it.

    first : such a message, without its body; mask : as long, 0 at every byte of these numbers, else 255
    numbers : int64 (n, 2): the place of one in the message, and what it counts for each row; -1: the values of all
        lists of the gradients, any number. The first is the number of rows, the second the length of the body, then
        come the lengths of columns, all int64
    buffers : int64 (m, 2): the place of a buffer's offset in the body, which its length follows, and its bytes for each
        row; -1: the bitmap of a column without nulls, or the values of lists of any lengths
    id_at, gradient_at, step_at : which of them are read; gradient_at, step_at -1: none
    width : float32 of a row; 0: of any row, which the buffer before says by its offsets
    codes_at : the buffer of the codes of tables; -1: all rows are of one table
    """
    cdef const uint8_t[::1] first, mask
    cdef const int64_t[:, ::1] numbers, buffers
    cdef Py_ssize_t id_at, gradient_at, step_at, width, codes_at, offsets_at

    def __init__(self, const uint8_t[::1] first not None, const uint8_t[::1] mask not None,
                 const int64_t[:, ::1] numbers not None, const int64_t[:, ::1] buffers not None, Py_ssize_t id_at,
                 Py_ssize_t gradient_at, Py_ssize_t step_at, Py_ssize_t width, Py_ssize_t codes_at=-1):
        cdef Py_ssize_t i, num_buffers = buffers.shape[0], end = first.shape[0] - 8
        # The offsets of lists, and the bitmap of their values, come before the values.
        self.offsets_at = gradient_at - 2 if codes_at >= 0 and not width else -1
        for i in range(numbers.shape[0]):
            if numbers.shape[1] != 2 or not 0 <= numbers[i, 0] <= end:
                raise ValueError(f"expected numbers in {end + 8} bytes, got one at {numbers[i, 0]}")
        for i in range(num_buffers):
            if buffers.shape[1] != 2 or not 0 <= buffers[i, 0] <= end - 8:
                raise ValueError(f"expected buffers in {end + 8} bytes, got one at {buffers[i, 0]}")
        for i, sizes in ((id_at, [8]), (gradient_at, [-1 if self.offsets_at >= 0 else 4 * width]), (step_at, [8]),
                         (codes_at, [1, 2, 4, 8]), (self.offsets_at, [4, 8])):
            if not -1 <= i < num_buffers or (i >= 0 and buffers[i, 1] not in sizes):
                raise ValueError(f"expected a buffer of {sizes[0]} bytes per row as number {i} of {num_buffers}")
        if mask.shape[0] != first.shape[0] or numbers.shape[0] < 2 or id_at < 0:
            raise ValueError("expected a mask of the message, its lengths and ids")
        self.first, self.mask, self.numbers, self.buffers = first, mask, numbers, buffers
        self.id_at, self.gradient_at, self.step_at, self.codes_at = id_at, gradient_at, step_at, codes_at
        self.width = width if gradient_at >= 0 else 0

    def read(self, data not None, Py_ssize_t begin, const int64_t[:, ::1] spans, index_t most_rows, bint ends_frames):
        """Read the next messages of a stream or a file; the first may have any number of rows.

        data : bytes, which lie still as long as the rows are in use; begin : where the first message begins
        spans : int64 (n, 2), where messages begin and end; None: one after the other
        most_rows : stop before more rows; ends_frames : whether a step ends with its batch; else stop before a batch
            that continues the last step. Of several tables, one message is read
        Returns the rows and where each of their messages begins, and the last one ends; None if there are no rows.
        """
        cdef Py_buffer view
        cdef PlainRows rows = PlainRows.__new__(PlainRows, self.width)
        cdef Columns columns
        cdef Py_ssize_t size, end = begin
        cdef list offsets = []
        owner = memoryview(data)
        PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE)
        try:
            while spans is None or len(offsets) < spans.shape[0]:
                if spans is not None:
                    begin = spans[len(offsets), 0]
                if not 0 <= begin <= view.len:
                    break
                size = self._fits(<const char*>view.buf + begin, view.len - begin, &columns)
                if not size or (spans is not None and spans[len(offsets), 1] != begin + size):
                    break
                if self.codes_at >= 0:
                    return self._coded(&columns, owner), [begin, begin + size]
                if offsets and rows.blocks.num_rows + columns.num_rows > most_rows:
                    break
                if not ends_frames and rows.continues(&columns):
                    break
                rows.add(&columns)
                offsets.append(begin)
                begin = end = begin + size
        finally:
            PyBuffer_Release(&view)
        if not offsets:
            return None
        rows.blocks.owners.append(owner)
        rows.find_pieces()
        return rows, offsets + [end]

    cdef CodedRows _coded(self, const Columns* columns, owner):
        cdef Py_ssize_t offset_bytes = self.buffers[self.offsets_at, 1] if self.offsets_at >= 0 else 0
        return coded_rows_of(columns, self.buffers[self.codes_at, 1], self.width, offset_bytes, owner)

    cdef Py_ssize_t _fits(self, const char* message, Py_ssize_t size, Columns* columns) noexcept nogil:
        """The bytes of a valid message of at least one row; 0: it is another one, or exceeds the size."""
        cdef Py_ssize_t i, head_size = self.first.shape[0]
        cdef const char* body = message + head_size
        cdef int64_t num_rows, body_size, offset, length, per_row, room = 0
        cdef uint8_t difference = 0
        if size < head_size:
            return 0
        for i in range(head_size):
            difference |= (<uint8_t>message[i] ^ self.first[i]) & self.mask[i]
        num_rows, body_size = number(message + self.numbers[0, 0]), number(message + self.numbers[1, 0])
        if difference or not 0 < num_rows <= body_size or body_size > size - head_size:
            return 0
        columns.num_rows = num_rows
        columns.rows = columns.steps = columns.codes = columns.offsets = NULL
        for i in range(self.buffers.shape[0]):
            offset, length = number(message + self.buffers[i, 0]), number(message + self.buffers[i, 0] + 8)
            per_row = self.buffers[i, 1]
            if offset % 8 or not 0 <= offset <= body_size or not 0 <= length <= body_size - offset:
                return 0
            # The offsets of lists are one more.
            if per_row > 0 and length // per_row < num_rows + (i == self.offsets_at):
                return 0
            if i == self.id_at:
                columns.ids = body + offset
            if i == self.gradient_at:
                columns.rows, room = body + offset, length // 4
            if i == self.step_at:
                columns.steps = body + offset
            if i == self.codes_at:
                columns.codes = body + offset
            if i == self.offsets_at:
                columns.offsets = body + offset
        # The gradients have a buffer, so that this product is within the body.
        columns.num_values = num_rows * self.width
        for i in range(2, self.numbers.shape[0]):
            length = number(message + self.numbers[i, 0])
            if self.numbers[i, 1] < 0:
                columns.num_values = length
                if not 0 <= length <= room:
                    return 0
            # A column of numbers has a buffer, so that this product is within the body.
            elif length != num_rows * self.numbers[i, 1]:
                return 0
        return head_size + body_size if <size_t>body % 8 == 0 else 0


cdef inline int64_t number(const char* place) noexcept nogil:
    cdef int64_t value
    memcpy(&value, place, sizeof(value))
    return value
