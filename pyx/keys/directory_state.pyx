"""A saved directory: the entries of a shard in order, and keys and candidates back into empty shards."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.key_shards cimport (
    Candidates, KeyEntry, RemovedKeys, Shard, Shards, candidates_reserve, find, is_expired, key_find, key_mix, key_unmix,
    removed_bytes_of_bits, removed_reserve, removed_restore, removed_save, shard_of,
)


cdef Py_ssize_t sorted_entries(const Shards* of, Py_ssize_t s, bint expired, KeyEntry* out) noexcept nogil:
    """Copy the entries of a shard in order of the mixed key, and return their number. expired : with expired keys

    Entries lie nearly in that order, since the place of each follows from its mixed key: insertion is fast.
    """
    cdef const KeyEntry* entries = of.entries + s * of.slots
    cdef Py_ssize_t i, n = 0
    cdef size_t at
    for at in range(of.slots):
        if entries[at].value < 0 or (not expired and is_expired(of, &entries[at], of.clock)):
            continue
        i = n
        while i > 0 and out[i - 1].mixed > entries[at].mixed:
            out[i] = out[i - 1]
            i -= 1
        out[i] = entries[at]
        n += 1
    return n


cdef sorted_candidates(Shards* of, Py_ssize_t n):
    """The n candidates, as ``Directory.candidates`` returns them."""
    cdef Py_ssize_t s, g, i = 0
    cdef size_t at
    cdef Candidates* some
    out = {"key": np.empty(n, np.int64), "count": np.empty(n, np.int32), "last": np.empty(n, np.uint32),
           "generation": np.empty(n, np.int8)}
    mixed_keys = np.empty(n, np.uint64)
    cdef uint64_t[::1] mixed = mixed_keys
    cdef int64_t[::1] key = out["key"]
    cdef int32_t[::1] count = out["count"]
    cdef uint32_t[::1] last = out["last"]
    cdef signed char[::1] generation = out["generation"]
    with nogil:
        for g in range(2):
            for s in range(of.num_shards):
                some = &of.each[s].old if g else &of.each[s].young
                for at in range(some.slots):
                    if some.entries[at].value >= 0:
                        mixed[i], last[i], generation[i] = some.entries[at].mixed, some.entries[at].last, g
                        key[i] = <int64_t>key_unmix(mixed[i], of.salt)
                        count[i] = some.entries[at].value
                        i += 1
    order = np.lexsort((mixed_keys, out["generation"]))
    return {name: array[order] for name, array in out.items()}


cdef restore_keys(Shards* of, const id_t[::1] keys, const uint32_t[::1] last, const int32_t[::1] saved):
    """Insert distinct keys into empty shards; return their rows: ``saved``, if given."""
    cdef Py_ssize_t i
    cdef uint64_t mixed
    cdef Shard* shard
    cdef KeyEntry* entry
    rows = np.empty(keys.shape[0], np.int32)
    cdef int32_t[::1] row = rows
    if last.shape[0] != keys.shape[0] or saved is not None and saved.shape[0] != keys.shape[0]:
        raise ValueError("the saved arrays differ in length")
    for i in range(keys.shape[0]):
        mixed = key_mix(<uint64_t>keys[i], of.salt)
        shard = &of.each[shard_of(of, mixed)]
        entry = find(of, mixed)
        if entry.value >= 0:
            raise ValueError(f"key {keys[i]} occurs twice")
        if shard.num_free == 0:
            raise ValueError(f"a virtual shard of {shard.num_rows} rows would have more keys than rows; set a "
                             f"vocabulary_size of at least {2 * of.capacity}")
        shard.num_free -= 1
        entry.mixed, entry.last = mixed, last[i]
        row[i] = of.free_rows[shard.first_row + shard.num_free] if saved is None else saved[i]
        if not shard.first_row <= row[i] < shard.first_row + shard.num_rows:
            raise ValueError(f"row {row[i]} is not of the shard of key {keys[i]}")
        entry.value = row[i]
        of.keys[row[i]] = keys[i]
        of.newest = max(of.newest, <int64_t>last[i])
    if saved is not None:
        free_rest(of, rows)
    return rows


cdef int free_rest(Shards* of, const int32_t[::1] rows) except -1:
    """Put all rows but these on the stacks."""
    cdef Py_ssize_t i, s
    cdef int32_t r, num_free
    used_rows = np.zeros(of.capacity, np.uint8)
    cdef unsigned char[::1] used = used_rows
    for i in range(rows.shape[0]):
        if used[rows[i]]:
            raise ValueError(f"two keys have row {rows[i]}")
        used[rows[i]] = 1
    for s in range(of.num_shards):
        num_free = 0
        for r in range(of.each[s].first_row + of.each[s].num_rows - 1, of.each[s].first_row - 1, -1):
            if not used[r]:
                of.free_rows[of.each[s].first_row + num_free] = r
                num_free += 1
    return 0


cdef restore_candidates(Shards* of, const id_t[::1] keys, const int32_t[::1] count, const uint32_t[::1] last,
                        const signed char[::1] generation):
    cdef Py_ssize_t i, n = keys.shape[0]
    cdef uint64_t mixed
    cdef Shard* shard
    cdef Candidates* some
    cdef KeyEntry* entry
    if count.shape[0] != n or last.shape[0] != n or generation.shape[0] != n:
        raise ValueError("the saved arrays differ in length")
    for i in range(n):
        mixed = key_mix(<uint64_t>keys[i], of.salt)
        shard = &of.each[shard_of(of, mixed)]
        some = &shard.old if generation[i] else &shard.young
        if candidates_reserve(some, some.size + 1, of.bits) < 0:
            raise MemoryError("cannot allocate the candidates of a directory")
        entry = key_find(some.entries, some.slots, of.bits, mixed)
        some.size += entry.value < 0
        entry.mixed, entry.value, entry.last = mixed, count[i], last[i]


cdef RemovedKeys* removed_of(const Shards* of, Py_ssize_t i) noexcept nogil:
    """Either generation of a shard's removed keys. i : from 0 to twice the number of shards"""
    return &of.each[i >> 1].before if i & 1 else &of.each[i >> 1].lately


cdef saved_removed(const Shards* of):
    """Return the removed keys as arrays by name: ``size`` int64, of every generation of every shard; ``bits`` uint8, of
    those that are not empty, and ``print`` uint32. A print says nothing about the shard or the slot of its key, so they
    are of use to a directory of this capacity alone."""
    cdef Py_ssize_t i, num_bytes = 0, num_prints = 0
    cdef RemovedKeys* some
    sizes = np.empty(2 * of.num_shards, np.int64)
    cdef int64_t[::1] size = sizes
    for i in range(2 * of.num_shards):
        some = removed_of(of, i)
        size[i] = some.size
        num_prints += some.size
        num_bytes += removed_bytes_of_bits(some) if some.size else 0
    all_bits, prints = np.empty(num_bytes + 1, np.uint8), np.empty(num_prints + 1, np.uint32)
    cdef unsigned char[::1] bits = all_bits
    cdef uint32_t[::1] print_ = prints
    num_bytes = num_prints = 0
    with nogil:
        for i in range(2 * of.num_shards):
            some = removed_of(of, i)
            if some.size:
                removed_save(some, &bits[num_bytes], &print_[num_prints])
                num_prints += some.size
                num_bytes += removed_bytes_of_bits(some)
    return {"size": sizes, "bits": all_bits[:num_bytes], "print": prints[:num_prints]}


cdef int restore_removed(Shards* of, const int64_t[::1] size, const unsigned char[::1] bits,
                         const uint32_t[::1] prints) except -1:
    """Put the keys of ``saved_removed`` into shards that have none, of a directory of the same capacity."""
    cdef Py_ssize_t i, num_bytes = 0, num_prints = 0
    cdef Shard* shard
    cdef RemovedKeys* some
    if size.shape[0] != 2 * of.num_shards:
        raise ValueError("the saved arrays differ in length")
    for i in range(2 * of.num_shards):
        if size[i] == 0:
            continue
        shard, some = &of.each[i >> 1], removed_of(of, i)
        if not 0 < size[i] <= shard.num_rows:
            raise ValueError(f"a virtual shard of {shard.num_rows} rows cannot remember {size[i]} keys")
        if removed_reserve(&shard.lately, shard.num_rows) < 0 or removed_reserve(&shard.before, shard.num_rows) < 0:
            raise MemoryError("cannot allocate the removed keys of a directory")
        if (num_bytes + <Py_ssize_t>removed_bytes_of_bits(some) > bits.shape[0]
                or num_prints + size[i] > prints.shape[0]
                or removed_restore(some, &bits[num_bytes], &prints[num_prints], size[i]) < 0):
            raise ValueError("the saved arrays differ in length")
        num_bytes += removed_bytes_of_bits(some)
        num_prints += size[i]
    return 0
