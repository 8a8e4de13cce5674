"""Map ids to (shard, row), route rows to the owners of their shards, and lay them out for devices.

Two strategies, exactly TensorFlow's (tpu_embedding_shape_util.cc): MOD assigns ids round robin, DIV
splits the table into contiguous runs of which the first ``vocabulary_size % num_shards`` are one
longer. Shards are virtual: a fixed number of them, in contiguous runs, belong to an owner (a
device), so that where a row lives in its shard does not depend on how many devices there are.

The functions that lay out release the GIL: ranges of rows (``destinations``) and devices (``number``, ``lay_rows``,
``lay_lines``) can be laid out on several threads.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ._types cimport grad_t, id_t

# The bit of a mark that says that a row is the first of its line; the others are its place there.
BEGINS = 0x80


cdef inline void locate_one(id_t key, id_t quotient, id_t remainder, id_t num_shards, bint mod,
                            id_t* shard, id_t* row) noexcept nogil:
    cdef id_t longer = remainder * (quotient + 1)     # ids in the shards that are one longer
    if mod:
        shard[0] = key % num_shards
        row[0] = key // num_shards
    elif key < longer:
        shard[0] = key // (quotient + 1)
        row[0] = key % (quotient + 1)
    else:
        shard[0] = remainder + (key - longer) // quotient
        row[0] = (key - longer) % quotient


def locate(const id_t[::1] ids not None, id_t vocabulary_size, id_t num_shards, bint mod):  # IN
    """The shard of every id and the row inside it.

    ids : int64, shape (n,), 0 <= id < vocabulary_size
    Returns shards int64 (n,), rows int64 (n,).
    """
    cdef Py_ssize_t i
    check(ids, vocabulary_size, num_shards)
    out_shards, out_rows = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.int64)
    cdef id_t[::1] shards = out_shards
    cdef id_t[::1] rows = out_rows
    with nogil:
        for i in range(ids.shape[0]):
            locate_one(ids[i], vocabulary_size // num_shards, vocabulary_size % num_shards, num_shards, mod,
                       &shards[i], &rows[i])
    return out_shards, out_rows


def place(const id_t[::1] ids not None, id_t vocabulary_size, id_t num_shards, bint mod,  # IN
          id_t shards_per_owner, id_t rows_per_shard, Py_ssize_t num_owners):
    """The owner of every id and its row there: int32 (n,) each."""
    cdef Py_ssize_t i
    cdef id_t shard, row
    check(ids, vocabulary_size, num_shards)
    if shards_per_owner * num_owners < num_shards:
        raise ValueError(f"{num_owners} owners of {shards_per_owner} shards do not hold {num_shards} shards")
    out_owners, out_rows = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.int32)
    cdef int32_t[::1] owners = out_owners
    cdef int32_t[::1] rows = out_rows
    with nogil:
        for i in range(ids.shape[0]):
            locate_one(ids[i], vocabulary_size // num_shards, vocabulary_size % num_shards, num_shards, mod,
                       &shard, &row)
            owners[i] = <int32_t>(shard // shards_per_owner)
            rows[i] = <int32_t>((shard % shards_per_owner) * rows_per_shard + row)
    return out_owners, out_rows


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
    Raises ValueError or IndexError; nothing has changed then.
    """
    cdef Py_ssize_t i, j, row, n = owners.shape[0], dim = grads.shape[1], num_owners = rows_at.shape[0]
    cdef id_t position, owner
    cdef grad_t* to
    check(owners, num_owners, 1)
    if n and dim > 1 and grads.strides[1] != sizeof(grad_t):
        raise ValueError("expected contiguous rows")
    if floats_at.shape[0] != num_owners or numbers.shape[0] != n or (
        grads.shape[0] != n if which is None else which.shape[0] != n
    ) or (gains is not None and gains.shape[0] != n) or (counts is not None and counts.shape[0] != n):
        raise ValueError(f"expected {n} numbers, gradients, factors and counts, and {num_owners} places")
    if which is not None:
        check(which, grads.shape[0], 1)
    need = np.bincount(np.asarray(owners), minlength=num_owners)
    if ((np.asarray(rows_at) + need).max(initial=0) > out_numbers.shape[0] or np.asarray(rows_at).min(initial=0) < 0
            or (np.asarray(floats_at) + need * dim).max(initial=0) > out_grads.shape[0]
            or np.asarray(floats_at).min(initial=0) < 0
            or (out_counts is not None and out_counts.shape[0] != out_numbers.shape[0])):
        raise IndexError(f"{n} rows of {dim} floats do not fit")
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
                 int32_t[::1] devices not None, int32_t[::1] lines not None, int32_t[::1] places not None):  # OUT
    """Put the device of every id, its line there, and its place among the rows of the line, into the outputs.

    ids : int64, shape (n,), 0 <= id < vocabulary_size; group : rows of a line; first_line : of the table on every device
    devices, lines, places : int32, shape (n,)
    """
    cdef Py_ssize_t i, n = ids.shape[0]
    cdef id_t quotient, remainder, shard = 0, row = 0
    if num_shards < 1 or shards_per_owner < 1 or rows_per_shard < 1 or group < 1:
        raise ValueError("expected at least one shard, one row in it, and one row in a line")
    if devices.shape[0] != n or lines.shape[0] != n or places.shape[0] != n:
        raise ValueError(f"expected room for {n} rows")
    quotient, remainder = vocabulary_size // num_shards, vocabulary_size % num_shards
    cdef Py_ssize_t wrong = -1
    with nogil:
        for i in range(n):
            if ids[i] < 0 or ids[i] >= vocabulary_size:
                wrong = i
                break
            locate_one(ids[i], quotient, remainder, num_shards, mod, &shard, &row)
            devices[i] = <int32_t>(shard // shards_per_owner)
            row += shard % shards_per_owner * rows_per_shard
            lines[i] = first_line + <int32_t>(row // group)
            places[i] = <int32_t>(row % group)
    if wrong >= 0:
        raise ValueError(f"id at {wrong}: expected 0 <= id < {vocabulary_size}, got {ids[wrong]}")


def by_device(const int32_t[::1] devices not None, Py_ssize_t num_devices):  # IN
    """Return the numbers of the rows ordered by device, int32 (n,), and where those of each begin, int64 (devices + 1,)."""
    cdef Py_ssize_t i, n = devices.shape[0]
    counts_of, order_of = np.zeros(num_devices + 1, np.int64), np.empty(n, np.int32)
    cdef int64_t[::1] counts = counts_of
    cdef int32_t[::1] order = order_of
    cdef Py_ssize_t wrong = -1
    with nogil:
        for i in range(n):
            if devices[i] < 0 or devices[i] >= num_devices:
                wrong = i
                break
            counts[devices[i] + 1] += 1
    if wrong >= 0:
        raise ValueError(f"row {wrong}: expected a device below {num_devices}, got {devices[wrong]}")
    starts_of = np.cumsum(counts_of)
    cdef int64_t[::1] next_of = starts_of.copy()
    with nogil:
        for i in range(n):
            order[next_of[devices[i]]] = <int32_t>i
            next_of[devices[i]] += 1
    return order_of, starts_of


def number(const int32_t[::1] rows not None, const int32_t[::1] lines not None):  # IN
    """Number the lines of some rows by first appearance.

    rows : int32, shape (n,), indices into ``lines``, which are int32 >= 0
    Returns the number of each row's line, int32 (n,); the lines, int32 (k,); and how many rows each has, int32 (k,).
    """
    cdef Py_ssize_t i, n = rows.shape[0], wrong = -1
    numbers_of, distinct_of = np.empty(n, np.int32), np.empty(n, np.int32)
    counts_of = np.zeros(n, np.int32)
    cdef int32_t[::1] numbers = numbers_of
    cdef int32_t[::1] distinct = distinct_of
    cdef int32_t[::1] counts = counts_of
    cdef size_t mask = 16, slot
    cdef int32_t line
    cdef uint32_t used = 0
    while mask < <size_t>(2 * n):
        mask *= 2
    cdef uint32_t* table = <uint32_t*>calloc(mask, sizeof(uint32_t))  # 1 + the number of a line, 0: free
    if table == NULL:
        raise MemoryError(f"no memory to number the lines of {n} rows")
    mask -= 1
    with nogil:
        for i in range(n):
            if rows[i] < 0 or rows[i] >= lines.shape[0]:
                wrong = i
                break
            line = lines[rows[i]]
            slot = (<size_t>(<uint32_t>line * <uint32_t>2654435769) >> 7) & mask
            while table[slot] != 0 and distinct[table[slot] - 1] != line:
                slot = (slot + 1) & mask
            if table[slot] == 0:
                distinct[used] = line
                used += 1
                table[slot] = used
            numbers[i] = <int32_t>(table[slot] - 1)
            counts[numbers[i]] += 1
    free(table)
    if wrong >= 0:
        raise ValueError(f"row {rows[wrong]} is not one of {lines.shape[0]}")
    return numbers_of, distinct_of[:used], counts_of[:used]


def lay_rows(const int32_t[::1] rows not None, const int32_t[::1] numbers not None,  # IN
             const int32_t[::1] places not None, int32_t first, const grad_t[:, ::1] values not None,  # IN
             int32_t[::1] next_of not None,  # IN, OUT
             int32_t[:, ::1] words not None, uint8_t[::1] marks not None, int32_t[::1] cells not None):  # OUT
    """Lay the bits of a device's rows one after the other, those of a line together.

    rows, numbers : int32, shape (n,), as for ``number``; places : int32, of all rows
    values : float32, shape (m, dim), of the rows ``first`` to ``first + m``
    next_of : int32, shape (lines,), where the next row of each line goes; at first where its rows begin, ascending
    words : int32, shape (size, dim); marks : uint8, shape (size,), the place of each row, and ``BEGINS`` for the first
        of a line; cells : int32, shape (n,), where each row went
    """
    cdef Py_ssize_t i, n = rows.shape[0], dim = values.shape[1], num_lines = next_of.shape[0], wrong = -1
    cdef int32_t row, line, cell
    if numbers.shape[0] != n or cells.shape[0] != n or words.shape[1] != dim or words.shape[0] != marks.shape[0]:
        raise ValueError(f"expected the lines and cells of {n} rows of {dim} words")
    with nogil:
        for i in range(n):
            row, line = rows[i], numbers[i]
            if (row < first or row - first >= values.shape[0] or row >= places.shape[0] or line < 0
                    or line >= num_lines or next_of[line] < 0 or next_of[line] >= words.shape[0]):
                wrong = i
                break
            cell = next_of[line]
            next_of[line] += 1
            cells[i] = cell
            marks[cell] = <uint8_t>places[row]
            memcpy(&words[cell, 0], &values[row - first, 0], dim * sizeof(grad_t))
    if wrong >= 0:
        raise ValueError(f"row {rows[wrong]} of line {numbers[wrong]} does not fit among {words.shape[0]}")


def lay_lines(const int32_t[::1] rows not None, const int32_t[::1] numbers not None,  # IN
              const int32_t[::1] offsets not None, int32_t first, const grad_t[:, ::1] values not None,  # IN
              int32_t[:, ::1] words not None):  # OUT
    """Lay the bits of a device's rows into the words of their lines. The other words stay.

    offsets : int32, of all rows, where each begins in its line; words : int32, shape (lines, words of a line)
    rows, numbers, first, values : as for ``lay_rows``
    """
    cdef Py_ssize_t i, n = rows.shape[0], dim = values.shape[1], wrong = -1
    cdef int32_t row, line
    if numbers.shape[0] != n:
        raise ValueError(f"expected the lines of {n} rows")
    with nogil:
        for i in range(n):
            row, line = rows[i], numbers[i]
            if (row < first or row - first >= values.shape[0] or row >= offsets.shape[0] or line < 0
                    or line >= words.shape[0] or offsets[row] < 0 or offsets[row] > words.shape[1] - dim):
                wrong = i
                break
            memcpy(&words[line, offsets[row]], &values[row - first, 0], dim * sizeof(grad_t))
    if wrong >= 0:
        raise ValueError(f"row {rows[wrong]} of {dim} words does not fit line {numbers[wrong]} of {words.shape[0]}")


cdef int check(const id_t[::1] ids, id_t vocabulary_size, id_t num_shards) except -1:
    cdef Py_ssize_t i
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= vocabulary_size:
            raise ValueError(f"id at {i}: expected 0 <= id < {vocabulary_size}, got {ids[i]}")
    return 0
