"""Owners of the keys of a dynamic table: a contiguous run of its virtual shards belongs to each of them."""

import numpy as np

from libc.stdint cimport int64_t, uint64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.initial_rows import philox_key
from penstock.pyx.keys.key_shards cimport Shards, key_mix, shards_divide


def owners(const id_t[::1] keys not None, int64_t seed, str table, int64_t capacity, int64_t count):
    """Return the owner of every key, from 0 to count - 1: int64 (n,).

    seed, table, capacity : of the table; count : number of owners
    """
    salt = int.from_bytes(philox_key(b"keys", seed, table)[:8], "little")
    return owners_of(keys, salt, capacity, count)


def owned_rows(int64_t capacity, int64_t rank, int64_t count):
    """Return which rows of a table one of its owners has: the first one, and how many."""
    cdef Shards shards
    shards_divide(&shards, capacity, 0, 0, 1)
    num_shards = shards.num_shards
    shards_divide(&shards, capacity, 0, rank, count)
    return shards.first_row, 0 if rank * num_shards // count == (rank + 1) * num_shards // count else shards.capacity


cdef owners_of(const id_t[::1] keys, uint64_t salt, int64_t capacity, int64_t count):
    cdef Py_ssize_t i
    cdef int64_t shard, num_shards
    cdef Shards shards
    shards_divide(&shards, capacity, 0, 0, 1)
    num_shards = shards.num_shards
    owners = np.empty(keys.shape[0], np.int64)
    cdef int64_t[::1] owner = owners
    with nogil:
        for i in range(keys.shape[0]):
            shard = <int64_t>(key_mix(<uint64_t>keys[i], salt) >> (64 - shards.bits)) if shards.bits else 0
            # The largest rank whose first shard, rank * num_shards // count, is not beyond this one.
            owner[i] = ((shard + 1) * count - 1) // num_shards
    return owners
