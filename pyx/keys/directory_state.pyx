"""A saved directory: the entries of a shard in order, and keys and candidates back into empty shards."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.key_shards cimport (
    Candidates, KeyEntry, RemovedKeys, Shard, Shards, candidates_reserve, find, is_expired, key_find, key_mix, key_unmix,
    removed_bytes_of_bits, removed_reserve, removed_restore, removed_save, shard_of,
)


cdef Py_ssize_t sorted_entries(const Shards* shards, Py_ssize_t s, bint expired, KeyEntry* out) noexcept nogil:
    """Copy the entries of a shard in order of the mixed key, and return their number. expired : with expired keys

    Entries lie nearly in that order, since the place of each follows from its mixed key: insertion is fast.
    """
    cdef const KeyEntry* entries = shards.entries + s * shards.slots
    cdef Py_ssize_t i, n = 0
    cdef size_t slot
    for slot in range(shards.slots):
        if entries[slot].value < 0 or (not expired and is_expired(shards, &entries[slot], shards.clock)):
            continue
        i = n
        while i > 0 and out[i - 1].mixed > entries[slot].mixed:
            out[i] = out[i - 1]
            i -= 1
        out[i] = entries[slot]
        n += 1
    return n


cdef sorted_candidates(Shards* shards, Py_ssize_t n):
    """The n candidates, as ``Directory.candidates`` returns them."""
    cdef Py_ssize_t s, g, i = 0
    cdef size_t slot
    cdef Candidates* candidates
    cdef KeyEntry entry
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
            for s in range(shards.num_shards):
                candidates = &shards.each[s].old if g else &shards.each[s].young
                for slot in range(candidates.slots):
                    if candidates.entries[slot].value >= 0:
                        entry = candidates.entries[slot]
                        mixed[i], last[i], generation[i], count[i] = entry.mixed, entry.last, g, entry.value
                        key[i] = <int64_t>key_unmix(mixed[i], shards.salt)
                        i += 1
    order = np.lexsort((mixed_keys, out["generation"]))
    return {name: array[order] for name, array in out.items()}


cdef restore_keys(Shards* shards, const id_t[::1] keys, const uint32_t[::1] last, const int32_t[::1] saved):
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
        mixed = key_mix(<uint64_t>keys[i], shards.salt)
        shard = &shards.each[shard_of(shards, mixed)]
        entry = find(shards, mixed)
        if entry.value >= 0:
            raise ValueError(f"key {keys[i]} occurs twice")
        if shard.num_free == 0:
            raise ValueError(f"a virtual shard of {shard.num_rows} rows would have more keys than rows; set a "
                             f"vocabulary_size of at least {2 * shards.capacity}")
        shard.num_free -= 1
        entry.mixed, entry.last = mixed, last[i]
        row[i] = shards.free_rows[shard.first_row + shard.num_free] if saved is None else saved[i]
        if not shard.first_row <= row[i] < shard.first_row + shard.num_rows:
            raise ValueError(f"row {row[i]} is not of the shard of key {keys[i]}")
        entry.value = row[i]
        shards.keys[row[i]] = keys[i]
        shards.newest = max(shards.newest, <int64_t>last[i])
    if saved is not None:
        free_rest(shards, rows)
    return rows


cdef int free_rest(Shards* shards, const int32_t[::1] rows) except -1:
    """Put all rows but these on the stacks."""
    cdef Py_ssize_t i, s
    cdef int32_t r, num_free
    used_rows = np.zeros(shards.capacity, np.uint8)
    cdef unsigned char[::1] used = used_rows
    for i in range(rows.shape[0]):
        if used[rows[i]]:
            raise ValueError(f"two keys have row {rows[i]}")
        used[rows[i]] = 1
    for s in range(shards.num_shards):
        num_free = 0
        for r in range(shards.each[s].first_row + shards.each[s].num_rows - 1, shards.each[s].first_row - 1, -1):
            if not used[r]:
                shards.free_rows[shards.each[s].first_row + num_free] = r
                num_free += 1
    return 0


cdef restore_candidates(Shards* shards, const id_t[::1] keys, const int32_t[::1] count, const uint32_t[::1] last,
                        const signed char[::1] generation):
    cdef Py_ssize_t i, n = keys.shape[0]
    cdef uint64_t mixed
    cdef Shard* shard
    cdef Candidates* candidates
    cdef KeyEntry* entry
    if count.shape[0] != n or last.shape[0] != n or generation.shape[0] != n:
        raise ValueError("the saved arrays differ in length")
    for i in range(n):
        mixed = key_mix(<uint64_t>keys[i], shards.salt)
        shard = &shards.each[shard_of(shards, mixed)]
        candidates = &shard.old if generation[i] else &shard.young
        if candidates_reserve(candidates, candidates.size + 1, shards.bits) < 0:
            raise MemoryError("cannot allocate the candidates of a directory")
        entry = key_find(candidates.entries, candidates.slots, shards.bits, mixed)
        candidates.size += entry.value < 0
        entry.mixed, entry.value, entry.last = mixed, count[i], last[i]


cdef RemovedKeys* removed_of(const Shards* shards, Py_ssize_t i) noexcept nogil:
    """Either generation of a shard's removed keys. i : from 0 to twice the number of shards"""
    return &shards.each[i >> 1].before if i & 1 else &shards.each[i >> 1].lately


cdef saved_removed(const Shards* shards):
    """Return the removed keys as arrays by name: ``size`` int64, of every generation of every shard; ``bits`` uint8, of
    those that are not empty, and ``print`` uint32. A print says nothing about the shard or the slot of its key, so they
    are of use to a directory of this capacity alone."""
    cdef Py_ssize_t i, num_bytes = 0, num_prints = 0
    cdef RemovedKeys* removed
    sizes = np.empty(2 * shards.num_shards, np.int64)
    cdef int64_t[::1] size = sizes
    for i in range(2 * shards.num_shards):
        removed = removed_of(shards, i)
        size[i] = removed.size
        num_prints += removed.size
        num_bytes += removed_bytes_of_bits(removed) if removed.size else 0
    all_bits, prints = np.empty(num_bytes + 1, np.uint8), np.empty(num_prints + 1, np.uint32)
    cdef unsigned char[::1] bits = all_bits
    cdef uint32_t[::1] print_ = prints
    num_bytes = num_prints = 0
    with nogil:
        for i in range(2 * shards.num_shards):
            removed = removed_of(shards, i)
            if removed.size:
                removed_save(removed, &bits[num_bytes], &print_[num_prints])
                num_prints += removed.size
                num_bytes += removed_bytes_of_bits(removed)
    return {"size": sizes, "bits": all_bits[:num_bytes], "print": prints[:num_prints]}


cdef int restore_removed(Shards* shards, const int64_t[::1] size, const unsigned char[::1] bits,
                         const uint32_t[::1] prints) except -1:
    """Put the keys of ``saved_removed`` into shards that have none, of a directory of the same capacity."""
    cdef Py_ssize_t i, num_bytes = 0, num_prints = 0
    cdef Shard* shard
    cdef RemovedKeys* removed
    if size.shape[0] != 2 * shards.num_shards:
        raise ValueError("the saved arrays differ in length")
    for i in range(2 * shards.num_shards):
        if size[i] == 0:
            continue
        shard, removed = &shards.each[i >> 1], removed_of(shards, i)
        if not 0 < size[i] <= shard.num_rows:
            raise ValueError(f"a virtual shard of {shard.num_rows} rows cannot remember {size[i]} keys")
        if removed_reserve(&shard.lately, shard.num_rows) < 0 or removed_reserve(&shard.before, shard.num_rows) < 0:
            raise MemoryError("cannot allocate the removed keys of a directory")
        if (num_bytes + <Py_ssize_t>removed_bytes_of_bits(removed) > bits.shape[0]
                or num_prints + size[i] > prints.shape[0]
                or removed_restore(removed, &bits[num_bytes], &prints[num_prints], size[i]) < 0):
            raise ValueError("the saved arrays differ in length")
        num_bytes += removed_bytes_of_bits(removed)
        num_prints += size[i]
    return 0
