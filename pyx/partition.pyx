"""Map ids to (shard, row), route rows to the owners of their shards, and lay them out for devices.

Two strategies, exactly TensorFlow's (tpu_embedding_shape_util.cc): MOD assigns ids round robin, DIV
splits the table into contiguous runs of which the first ``vocabulary_size % num_shards`` are one
longer. Shards are virtual: a fixed number of them, in contiguous runs, belong to an owner (a
device), so that where a row lives in its shard does not depend on how many devices there are.

``packing.Packer`` calls the functions that lay out, on what ``destinations`` has checked and on arrays that it
allocates: the others check neither again. They release the GIL: ranges of rows (``destinations``, ``order``, ``lay``) and devices
(``number``, ``group``) can be laid out on several threads.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ._types cimport grad_t, id_t

cdef extern from "row_layout.h" nogil:
    ctypedef struct Cells:
        char* words
        long cell_bytes, device_bytes
        int32_t* lines
        long first_cell, num_cells
        const int32_t* offsets
        long num_offsets
    void lay_all(const Cells* to, const char* rows, long num_bytes, long n, const int32_t* devices,
                 const int32_t* cells, const int32_t* lines, const int32_t* places, bint streams)

# The bit of a mark that says that a row is the first of its line; the others are its place there.
BEGINS = 0x80

cdef enum:
    FIRST_OF_LINE = 0x80


def locate(const id_t[::1] ids not None, id_t vocabulary_size, id_t num_shards, bint mod):  # IN
    """The shard of every id and the row inside it.

    ids : int64, shape (n,), 0 <= id < vocabulary_size
    Returns shards int64 (n,), rows int64 (n,).
    """
    cdef Py_ssize_t i
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    check(ids, vocabulary_size)
    cdef Shards of_table = shards_of(vocabulary_size, num_shards, mod)
    out_shards, out_rows = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.int64)
    cdef id_t[::1] shards = out_shards
    cdef id_t[::1] rows = out_rows
    with nogil:
        for i in range(ids.shape[0]):
            locate_one(ids[i], &of_table, &shards[i], &rows[i])
    return out_shards, out_rows


def scatter(const id_t[::1] owners not None, const id_t[::1] numbers not None,  # IN
            const grad_t[:, :] grads not None, const id_t[::1] which, const grad_t[::1] gains,  # IN
            const id_t[::1] counts,  # IN
            id_t[::1] rows_at not None, id_t[::1] floats_at not None,  # IN, OUT
            id_t[::1] out_numbers not None, grad_t[::1] out_grads not None, uint32_t[::1] out_counts):  # OUT
    """Append rows to the rows of their owners, in their order: the second pass of a counting sort by owner.

    owners, numbers : int64 (n,), of every row; grads : float32 (m, dim), rows contiguous; which : int64 (n,), the row of
        grads of each; None: all in order; gains : float32 (n,), factors; None: none; counts : int64 (n,), raw rows of each; None: 1
    rows_at, floats_at : int64 (number of owners,), where each owner's rows continue in the outputs; moved on
    out_numbers : int64; out_grads : float32; out_counts : uint32, or None: not wanted
    The caller has counted the rows of each owner: the outputs have room for them.
    """
    cdef Py_ssize_t i, j, row, n = owners.shape[0], dim = grads.shape[1], num_owners = rows_at.shape[0]
    cdef id_t position, owner
    cdef grad_t* to
    if n and dim > 1 and grads.strides[1] != sizeof(grad_t):
        raise ValueError("expected contiguous rows")
    if floats_at.shape[0] != num_owners or numbers.shape[0] != n or (
        grads.shape[0] != n if which is None else which.shape[0] != n
    ) or (gains is not None and gains.shape[0] != n) or (counts is not None and counts.shape[0] != n):
        raise ValueError(f"expected {n} numbers, gradients, factors and counts, and {num_owners} places")
    with nogil:
        for i in range(n):
            owner = owners[i]
            row = i if which is None else which[i]
            to = &out_grads[floats_at[owner]] if dim else NULL
            if gains is None:
                memcpy(to, &grads[row, 0], dim * sizeof(grad_t))
            else:
                for j in range(dim):
                    to[j] = grads[row, j] * gains[i]
            position = rows_at[owner]
            out_numbers[position] = numbers[i]
            if out_counts is not None:
                out_counts[position] = 1 if counts is None else <uint32_t>counts[i]
            rows_at[owner] += 1
            floats_at[owner] += dim


def destinations(const id_t[::1] ids not None, id_t vocabulary_size, id_t num_shards, bint mod,  # IN
                 id_t shards_per_owner, id_t rows_per_shard, id_t group, int32_t first_line,  # IN
                 int32_t[::1] devices not None, int32_t[::1] lines not None, int32_t[::1] places,  # OUT
                 int64_t[::1] counts not None):  # IN, OUT
    """Put the device of every id, its line there, and its place among the rows of the line, into the outputs.

    ids : int64, shape (n,), 0 <= id < vocabulary_size; group : rows of a line; first_line : of the table on every device
    devices, lines, places : int32, shape (n,); places None: not wanted. With a group of 1, a line is the row there
    counts : int64, shape (devices,): the rows of each are added
    """
    cdef Py_ssize_t i, n = ids.shape[0], num_devices = counts.shape[0], wrong = -1
    cdef id_t shard = 0, row = 0, device, line
    if vocabulary_size < 1 or num_shards < 1 or shards_per_owner < 1 or rows_per_shard < 1 or group < 1:
        raise ValueError("expected at least one row, one shard, one row in it, and one row in a line")
    if devices.shape[0] != n or lines.shape[0] != n or (places is not None and places.shape[0] != n):
        raise ValueError(f"expected room for {n} rows")
    if shards_per_owner * num_devices < num_shards:
        raise ValueError(f"{num_devices} devices of {shards_per_owner} shards do not hold {num_shards} shards")
    cdef Shards of_table = shards_of(vocabulary_size, num_shards, mod)
    cdef Divisor per_owner = divisor_of(shards_per_owner), per_line = divisor_of(group)
    with nogil:
        for i in range(n):
            if <uint64_t>ids[i] >= <uint64_t>vocabulary_size:
                wrong = i
                break
            locate_one(ids[i], &of_table, &shard, &row)
            device = divided(shard, per_owner)
            row += (shard - device * shards_per_owner) * rows_per_shard
            line = divided(row, per_line)
            devices[i] = <int32_t>device
            lines[i] = first_line + <int32_t>line
            counts[device] += 1
            if places is not None:
                places[i] = <int32_t>(row - line * group)
    if wrong >= 0:
        raise ValueError(f"id at {wrong}: expected 0 <= id < {vocabulary_size}, got {ids[wrong]}")


def order(const int32_t[::1] devices not None, int32_t first,  # IN
          int64_t[::1] next_of not None,  # IN, OUT
          int32_t[::1] cells not None, const int64_t[::1] starts, int32_t[::1] entries):  # OUT
    """Number the rows of each device in their order.

    devices : int32, shape (n,); first : the number of the first of these rows among all
    next_of : int64, shape (devices,), the next number of each; moved on
    cells : int32, shape (n,), the number of each row
    starts : int64, shape (devices,), where those of each begin in ``entries``, int32, into which rows are put by device;
        None: neither is wanted
    """
    cdef Py_ssize_t i
    cdef int64_t cell
    with nogil:
        for i in range(devices.shape[0]):
            cell = next_of[devices[i]]
            next_of[devices[i]] = cell + 1
            cells[i] = <int32_t>cell
            if entries is not None:
                entries[cell + starts[devices[i]]] = first + <int32_t>i


def number(const int32_t[::1] rows not None, const int32_t[::1] lines not None,  # IN
           int32_t[::1] numbers not None):  # OUT
    """Number the lines of some rows by first appearance.

    rows : int32, shape (n,), of ``order``'s entries, indices into ``lines``, which are int32 >= 0
    numbers : int32, of all rows: the number of its line is put where each of these rows is
    Returns the lines, int32 (k,).
    """
    cdef Py_ssize_t i, n = rows.shape[0]
    distinct_of = np.empty(n, np.int32)
    cdef int32_t[::1] distinct = distinct_of
    cdef size_t mask = 16, slot
    cdef int32_t line
    cdef uint32_t used = 0
    while mask < <size_t>(2 * n):
        mask *= 2
    # A line above the number that it has, plus 1; 0: free. One load tells both.
    cdef uint64_t* table = <uint64_t*>calloc(mask, sizeof(uint64_t))
    if table == NULL:
        raise MemoryError(f"no memory to number the lines of {n} rows")
    mask -= 1
    with nogil:
        for i in range(n):
            line = lines[rows[i]]
            slot = (<size_t>(<uint32_t>line * <uint32_t>2654435769) >> 7) & mask
            while table[slot] != 0 and <int32_t>(table[slot] >> 32) != line:
                slot = (slot + 1) & mask
            if table[slot] == 0:
                distinct[used] = line
                used += 1
                table[slot] = <uint64_t><uint32_t>line << 32 | used
            numbers[rows[i]] = <int32_t>(<uint32_t>table[slot] - 1)
    free(table)
    return distinct_of[:used]


def group(const int32_t[::1] rows not None, Py_ssize_t num_lines, const int32_t[::1] places not None,  # IN
          int32_t[::1] cells not None,  # IN, OUT
          uint8_t[::1] marks not None):  # OUT
    """Give some rows cells from 0 on, those of a line together, lines in the order of their numbers.

    rows : int32, shape (n,), of ``order``'s entries, indices into ``places``, the place of each row in its line, and
        into ``cells``
    cells : int32; IN the number of each row's line, as ``number`` gives it, below ``num_lines``, OUT its cell
    marks : uint8, shape (size,), by cell the place of the row, and ``BEGINS`` for the first of a line. Cells beyond the
        rows are pads, each the first of a line
    """
    cdef Py_ssize_t i, n = rows.shape[0]
    cdef int32_t row, cell = 0, count
    next_of = np.zeros(max(num_lines, <Py_ssize_t>0) + 1, np.int32)
    cdef int32_t[::1] next_cell = next_of
    with nogil:
        for i in range(n):
            next_cell[cells[rows[i]]] += 1
        for i in range(num_lines):
            count = next_cell[i]
            next_cell[i] = cell
            cell += count
        for i in range(n):
            row = rows[i]
            cell = next_cell[cells[row]]
            next_cell[cells[row]] = cell + 1
            cells[row] = cell
            marks[cell] = <uint8_t>places[row]
        for i in range(n, marks.shape[0]):
            marks[i] = FIRST_OF_LINE
        # The first of each line: where the line before it has ended.
        if n:
            marks[0] |= FIRST_OF_LINE
        for i in range(num_lines - 1):
            marks[next_cell[i]] |= FIRST_OF_LINE


def lay(const int32_t[::1] devices not None, const int32_t[::1] cells not None, int32_t first_cell,  # IN
        const grad_t[:, ::1] values not None,  # IN
        int32_t[:, :, ::1] words not None,  # OUT
        const int32_t[::1] places=None, const int32_t[::1] offsets=None,  # IN
        const int32_t[::1] lines=None, int32_t[:, ::1] out_lines=None, bint streams=False):  # IN, OUT
    """Copy the bits of rows to their cells, of those from ``first_cell`` on that ``words`` has; skip the other rows.

    devices, cells : int32, shape (n,), of each row; values : float32, shape (n, dim)
    words : int32, shape (devices, cells, words of a cell). Those that no row covers stay
    places : int32, shape (n,), of the rows in their cells; offsets : int32, the words before each place; None: a cell
        has one row
    lines : int32, shape (n,), of the rows; out_lines : int32, shape (devices, cells), the line of each cell; None:
        neither is wanted
    streams : write past the caches, if cells and rows are whole cache lines: nothing reads them again soon
    """
    cdef Py_ssize_t n = devices.shape[0], dim = values.shape[1]
    cdef Cells to
    starts = np.zeros(1, np.int32) if offsets is None else np.asarray(offsets)
    if len(starts) and (starts.min() < 0 or starts.max() + dim > words.shape[2]):
        raise ValueError(f"a row of {dim} words does not fit a cell of {words.shape[2]}")
    if not n or not dim or not words.shape[0] or not words.shape[1]:
        return
    cdef const int32_t[::1] num_bytes = starts.astype(np.int32) * <int>sizeof(int32_t)
    to.words, to.cell_bytes = <char*>&words[0, 0, 0], words.shape[2] * sizeof(int32_t)
    to.device_bytes = to.cell_bytes * words.shape[1]
    to.first_cell, to.num_cells = first_cell, words.shape[1]
    to.lines = NULL if out_lines is None else &out_lines[0, 0]
    to.offsets, to.num_offsets = NULL, 0
    if offsets is not None and num_bytes.shape[0]:
        to.offsets, to.num_offsets = &num_bytes[0], num_bytes.shape[0]
    with nogil:
        lay_all(&to, <const char*>&values[0, 0], dim * sizeof(grad_t), n, &devices[0], &cells[0],
                NULL if lines is None else &lines[0], NULL if places is None else &places[0], streams)


cdef int check(const id_t[::1] ids, id_t vocabulary_size) except -1:
    cdef Py_ssize_t i
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= vocabulary_size:
            raise ValueError(f"id at {i}: expected 0 <= id < {vocabulary_size}, got {ids[i]}")
    return 0
