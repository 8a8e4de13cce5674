"""Map ids to (shard, row), and pack rows into lines that several rows may share.

Two strategies, exactly TensorFlow's (tpu_embedding_shape_util.cc): MOD deals ids round robin, DIV
cuts the table into contiguous runs of which the first ``vocabulary_size % num_shards`` are one
longer. Shards are virtual: a fixed number of them, in contiguous runs, belong to an owner (a
device), so that where a row lives in its shard does not depend on how many devices there are.
"""

import numpy as np

from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from ._types cimport grad_t, id_t


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
    cdef id_t at, owner
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
            at = rows_at[owner]
            out_numbers[at] = numbers[i]
            if out_counts is not None:
                out_counts[at] = 1 if counts is None else <uint32_t>counts[i]
            rows_at[owner] += 1
            floats_at[owner] += dim


def lay(const id_t[::1] lines not None, const id_t[::1] offsets not None,  # IN
        const grad_t[:, ::1] grads not None, int32_t[:, ::1] out not None):  # OUT
    """Lay the bits of rows into lines of words that several of them may share. The other words stay.

    lines, offsets : int64, shape (n,): row i goes to ``out[lines[i], offsets[i]:]``, its bits as int32
    grads : float32, shape (n, dim)
    """
    cdef Py_ssize_t i, n = lines.shape[0], dim = grads.shape[1]
    if offsets.shape[0] != n or grads.shape[0] != n:
        raise ValueError(f"expected {n} offsets and rows, got {offsets.shape[0]} and {grads.shape[0]}")
    for i in range(n):
        if lines[i] < 0 or lines[i] >= out.shape[0] or offsets[i] < 0 or offsets[i] > out.shape[1] - dim:
            raise ValueError(f"row {i} of {dim} words does not fit at ({lines[i]}, {offsets[i]}) of {out.shape[0]} lines")
    with nogil:
        for i in range(n):
            memcpy(&out[lines[i], offsets[i]], &grads[i, 0], dim * sizeof(grad_t))


cdef int check(const id_t[::1] ids, id_t vocabulary_size, id_t num_shards) except -1:
    cdef Py_ssize_t i
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    for i in range(ids.shape[0]):
        if ids[i] < 0 or ids[i] >= vocabulary_size:
            raise ValueError(f"id at {i}: expected 0 <= id < {vocabulary_size}, got {ids[i]}")
    return 0
