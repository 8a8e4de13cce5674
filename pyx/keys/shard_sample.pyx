"""Some of a directory's virtual shards in place of all of them: shards are independent, so a sample of them is exact."""

import numpy as np

from libc.stdint cimport int64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.directory cimport Directory
from penstock.pyx.keys.key_shards cimport Shard, key_mix

def sampled(Directory directory not None, const id_t[::1] keys not None, int sample_bits):
    """Return the positions of the keys whose shards a directory with these ``sample_bits`` keeps: int64 (m,), ascending.

    directory : of the same seed and table; of any capacity with as many shards at least
    """
    cdef Py_ssize_t i, m = 0, n = keys.shape[0]
    cdef int shift = 64 - sample_bits
    positions = np.empty(n, np.int64)
    cdef int64_t[::1] position = positions
    if sample_bits == 0:
        return np.arange(n)
    with nogil:
        for i in range(n):
            position[m] = i
            m += key_mix(<unsigned long long>keys[i], directory.shards.salt) >> shift == 0
    return positions[:m]


def by_shard(Directory directory not None):
    """Return what became of the keys of each shard since the directory was created, and ``keys``, those that have a row:
    arrays by the names of KeyReport, int64 (number of shards,)."""
    cdef Shard* shard
    cdef Py_ssize_t s
    counts = []
    for s in range(directory.shards.num_shards):
        shard = &directory.shards.each[s]
        counts.append({"keys": shard.num_rows - shard.num_free, **dict(shard.counts)})
    return {name: np.array([of_shard[name] for of_shard in counts], np.int64) for name in counts[0]}
