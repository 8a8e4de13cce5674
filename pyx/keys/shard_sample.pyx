"""Some of a directory's virtual shards in place of all of them: shards are independent, so a sample of them is exact."""

import numpy as np

from libc.stdint cimport int64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.directory cimport Directory
from penstock.pyx.keys.key_shards cimport Shard, key_mix

COUNTED = ("num_admitted", "num_expired", "num_evicted", "num_returned", "num_rejected", "unadmitted_rows")


def sampled(Directory directory not None, const id_t[::1] keys not None, int sample_bits):
    """Return the positions of the keys whose shards a directory with these ``sample_bits`` keeps: int64 (m,), ascending.

    directory : of the same seed and table; of any capacity with as many shards at least
    """
    cdef Py_ssize_t i, m = 0, n = keys.shape[0]
    cdef int shift = 64 - sample_bits
    found = np.empty(n, np.int64)
    cdef int64_t[::1] at = found
    if sample_bits == 0:
        return np.arange(n)
    with nogil:
        for i in range(n):
            at[m] = i
            m += key_mix(<unsigned long long>keys[i], directory.shards.salt) >> shift == 0
    return found[:m]


def by_shard(Directory directory not None):
    """Return arrays by name, int64 (number of shards,): ``num_keys`` that have a row, the ``rows`` of the shard, and what
    became of keys since the directory was created, as ``COUNTED`` names it."""
    cdef Shard* shard
    cdef Py_ssize_t s, n = directory.shards.num_shards
    table = np.empty((n, 2 + len(COUNTED)), np.int64)
    cdef int64_t[:, ::1] counts = table
    for s in range(n):
        shard = &directory.shards.each[s]
        counts[s, 0], counts[s, 1] = shard.num_rows - shard.num_free, shard.num_rows
        counts[s, 2], counts[s, 3] = shard.counts.num_admitted, shard.counts.num_expired
        counts[s, 4], counts[s, 5] = shard.counts.num_evicted, shard.counts.num_returned
        counts[s, 6], counts[s, 7] = shard.counts.num_rejected, shard.counts.unadmitted_rows
    return dict(zip(("num_keys", "rows", *COUNTED), table.T, strict=True))
