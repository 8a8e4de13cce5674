"""Marks of a table's rows, a byte each: changed since the last commit, pending a copy for the commit in flight.

A step marks the rows it is about to change and learns which of them still wait; the background takes the others,
in the order in which rows lie in memory. Both happen between steps, so they cost a pass over the ids or a bounded
look at the marks and no more.
"""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from ._types cimport id_t
from .prefetch cimport prefetch_write

cdef enum:
    CHANGED_BIT = 1
    WAITING_BIT = 2
    AHEAD = 16          # marks lie anywhere in a large array: asked for before their turn comes
# WAITING_BIT of eight marks.
cdef uint64_t EIGHT_WAITING = 0x0202020202020202

CHANGED, WAITING = CHANGED_BIT, WAITING_BIT


def change(uint8_t[::1] marks not None, const id_t[::1] ids not None, id_t[::1] waiting not None):
    """Mark rows as changed; those that waited do not any more.

    ids : int64 (n,), distinct; waiting : OUT, room for n: the ids of the rows that waited, in the order of ids
    Returns how many waited. Raises IndexError, and has marked nothing then.
    """
    cdef Py_ssize_t i, num_waiting = 0, n = ids.shape[0]
    cdef id_t size = marks.shape[0]
    if waiting.shape[0] < n:
        raise ValueError(f"expected room for {n} ids, got {waiting.shape[0]}")
    for i in range(n):
        if ids[i] < 0 or ids[i] >= size:
            raise IndexError(f"id {ids[i]} of a table of {size} rows")
    with nogil:
        for i in range(n):
            if i + AHEAD < n:
                prefetch_write(&marks[ids[i + AHEAD]])
            # Written whether it waits or not, and kept only where it does: no branch to guess.
            waiting[num_waiting] = ids[i]
            num_waiting += marks[ids[i]] >> 1 & 1
            marks[ids[i]] = CHANGED_BIT
    return num_waiting


def take(uint8_t[::1] marks not None, id_t cursor, id_t stride, Py_ssize_t most_looked_at, id_t[::1] out not None):
    """The next rows that wait, which do not any more.

    cursor : the row to begin with; one after the last: there is none left
    stride : rows so far apart lie next to each other: row 0, stride, 2 * stride, …, then row 1, 1 + stride, …
    most_looked_at : marks, about; out : OUT, room for as many as are wanted
    Returns how many were taken, and the cursor to continue from.
    """
    cdef Py_ssize_t num_waiting = 0, looked_at = 0, most = out.shape[0]
    cdef id_t row = cursor, size = marks.shape[0]
    if cursor < 0 or stride < 1:
        raise ValueError(f"expected a cursor from 0 and a stride from 1, got {cursor} and {stride}")
    with nogil:
        while row < size and num_waiting < most and looked_at < most_looked_at:
            if stride == 1 and none_of_eight(marks, row, size):
                row += 8
                looked_at += 8
                continue
            if marks[row] & WAITING_BIT:
                out[num_waiting] = row
                num_waiting += 1
                marks[row] &= CHANGED_BIT
            row = next_row(row, stride, size)
            looked_at += 1
    return num_waiting, row


cdef inline bint none_of_eight(uint8_t[::1] marks, id_t row, id_t size) noexcept nogil:
    cdef uint64_t eight
    if row + 8 > size:
        return False
    memcpy(&eight, &marks[row], 8)
    return not eight & EIGHT_WAITING


cdef inline id_t next_row(id_t row, id_t stride, id_t size) noexcept nogil:
    if row + stride < size:
        return row + stride
    row = row % stride + 1
    return row if row < min(stride, size) else size
