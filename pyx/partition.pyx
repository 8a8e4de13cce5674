"""Map ids to (shard, row), and pack rows into lines that several rows may share.

Two strategies, exactly TensorFlow's (tpu_embedding_shape_util.cc): MOD deals ids round robin, DIV
cuts the table into contiguous runs of which the first ``vocabulary_size % num_shards`` are one
longer. Shards are virtual: a fixed number of them, in contiguous runs, belong to an owner (a
device), so that where a row lives in its shard does not depend on how many devices there are.
"""

import numpy as np

from libc.stdint cimport int32_t
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
