"""Which key has which row: the directory in front of a table of ``capacity`` rows, for keys of 64 bits.

``directory_plan.Plan`` is the only writer. The twin of both is ``reference_directory``.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.buffer_pool cimport Block, Pool
from penstock.pyx.initial_rows import philox_key
from penstock.pyx.keys.key_owners cimport owners_of
from penstock.pyx.keys.key_shards cimport (
    AHEAD, EVICT_LFU, EVICT_LRU, MOST_SHARDS, Candidates, KeyEntry, RemovedKeys, Shard, Shards, age, candidates_reserve,
    decayed, find, find_candidate, home_of, is_expired, key_find, key_mix, key_unmix, removed_bytes_of_bits,
    removed_reserve, removed_restore, removed_save, shard_of, shards_bytes, shards_divide, shards_free, shards_init,
)
from penstock.pyx.prefetch cimport prefetch

POLICIES = {None: 0, "lru": EVICT_LRU, "lfu": EVICT_LFU}


cdef class Directory:
    """The keys of one table.

    capacity : rows; seed, table : of the hash and of admission by chance
    min_count : occurrences that admit a key, rows or (``by_frames``) frames; 1: every key
    probability : of admission per row, instead of min_count; None: by count
    forget_after : steps after which candidates change generations; None: whenever a shard has as many as it has rows
    expire_after : a key expires when the clock is further than this from its last occurrence; None: never
    evict : None, "lru" or "lfu"; half_life : of LFU's counts, by the clock
    sample_bits : keep one virtual shard of 2 ** sample_bits, for keys of ``shard_sample.sampled`` only
    share : (rank, count): keep the virtual shards of one of ``count`` owners, for keys that ``key_owners.owners`` gives it

    counts : what became of keys so far, by the names of KeyReport
    """

    def __cinit__(self, int64_t capacity, int64_t seed, str table, *, int32_t min_count=1, bint by_frames=False,
                  probability=None, forget_after=None, expire_after=None, evict=None, half_life=None,
                  int sample_bits=0, share=(0, 1)):
        cdef Shards* shards = &self.shards
        if not 1 <= capacity < 2**31:
            raise ValueError(f"capacity must be from 1 to 2147483647, got {capacity}")
        if (evict == "lfu") != (half_life is not None):
            raise ValueError("half_life belongs to evict='lfu', which needs it")
        hashed, drawn = philox_key(b"keys", seed, table), philox_key(b"admission", seed, table)
        shards.salt = int.from_bytes(hashed[:8], "little")
        shards.chance.low, shards.chance.high = [int.from_bytes(half, "little") for half in (drawn[:8], drawn[8:])]
        shards.policy.min_count, shards.policy.by_frames, shards.policy.evict = min_count, by_frames, POLICIES[evict]
        shards.policy.by_chance, shards.policy.probability = probability is not None, probability or 0.0
        periods = [-1 if period is None else period for period in (forget_after, expire_after, half_life)]
        shards.policy.forget_after, shards.policy.expire_after, shards.policy.half_life = periods
        shards.policy.sweep_period = MOST_SHARDS
        self.pool, self.share, self.whole_capacity = Pool(), share, capacity
        if shards_init(shards, capacity, sample_bits, share[0], share[1]) < 0:
            raise MemoryError(f"cannot allocate a directory of {capacity} keys")

    def __dealloc__(self):
        shards_free(&self.shards)

    # ---- reading, which changes nothing

    @property
    def capacity(self):
        return self.shards.capacity

    @property
    def num_shards(self):
        return self.shards.num_shards

    @property
    def clock(self):
        """The clock of the last opening."""
        return self.shards.clock

    def __len__(self):
        """Keys with a row, including expired ones that wait for their sweep."""
        cdef Py_ssize_t s, n = 0
        for s in range(self.shards.num_shards):
            n += self.shards.each[s].num_rows - self.shards.each[s].num_free
        return n

    @property
    def nbytes(self):
        """Bytes of entries, keys, free rows and counts; without candidates."""
        return shards_bytes(&self.shards)

    @property
    def candidate_bytes(self):
        """Bytes of candidates, and of the keys that lost their row recently."""
        cdef Py_ssize_t s, slots = 0, prints = 0
        for s in range(self.shards.num_shards):
            slots += self.shards.each[s].young.slots + self.shards.each[s].old.slots
            prints += self.shards.each[s].lately.slots + self.shards.each[s].before.slots
        return slots * sizeof(KeyEntry) + prints * sizeof(uint32_t)

    @property
    def num_waiting(self):
        """Candidates that wait for admission."""
        cdef Py_ssize_t s, n = 0
        self.settle()
        for s in range(self.shards.num_shards):
            age(&self.shards, &self.shards.each[s], self.shards.generation)
            n += self.shards.each[s].young.size + self.shards.each[s].old.size
        return n

    def num_expired_waiting(self, Py_ssize_t first=0, Py_ssize_t count=MOST_SHARDS):
        """Return how many keys with a row are expired and wait for their sweep, in ``count`` shards from ``first`` on."""
        cdef Shards* shards = &self.shards
        cdef Py_ssize_t i, slots = shards.slots, n = 0
        self.settle()
        if shards.policy.expire_after >= 0:
            with nogil:
                for i in range(first * slots, min(first + count, shards.num_shards) * slots):
                    n += (shards.entries[i].value >= 0) & is_expired(shards, &shards.entries[i], shards.clock)  # no branch
        return n

    def rows(self, const id_t[::1] keys not None, bint expired=False):
        """Return the row of every key, -1 where it has none: int32 (n,). keys : int64 (n,)

        expired : also of expired keys that wait for their sweep
        A plan that is not committed yet makes no difference and stays open.
        """
        cdef Shards* shards = &self.shards
        cdef Py_ssize_t i, n = keys.shape[0]
        cdef KeyEntry* entry
        out = np.empty(n, np.int32)
        cdef int32_t[::1] rows = out
        with nogil:
            for i in range(n):
                if i + AHEAD < n:
                    prefetch(shards.entries + home_of(shards, key_mix(<uint64_t>keys[i + AHEAD], shards.salt)))
                entry = find(shards, key_mix(<uint64_t>keys[i], shards.salt))
                rows[i] = entry.value
                if entry.value < 0 or (not expired and is_expired(shards, entry, shards.clock)):
                    rows[i] = -1
        return out

    def keys(self, const id_t[::1] rows not None):
        """Return the key of every row, int64 (n,). rows : int64 (n,), of keys that have one"""
        cdef Py_ssize_t i
        out = np.empty(rows.shape[0], np.int64)
        cdef int64_t[::1] keys = out
        for i in range(rows.shape[0]):
            if not 0 <= rows[i] < self.shards.capacity:
                raise IndexError(f"no row {rows[i]} of {self.shards.capacity}")
            keys[i] = self.shards.keys[rows[i]]
        return out

    def records(self, const id_t[::1] keys not None, bint expired=False):
        """Return the records of keys, as arrays by name: ``row`` int32, -1 where it has none or is expired;
        ``last`` int64, the clock when it occurred last, -1 if unknown; ``count`` int64, LFU's; ``waiting`` int64, the
        occurrences of a candidate. expired : also the rows of expired keys that wait for their sweep"""
        cdef Shards* shards = &self.shards
        cdef Py_ssize_t i, n = keys.shape[0]
        cdef uint64_t mixed
        cdef KeyEntry* entry
        self.settle()
        out = {"row": np.full(n, -1, np.int32), "last": np.full(n, -1, np.int64), "count": np.zeros(n, np.int64),
               "waiting": np.zeros(n, np.int64)}
        cdef int32_t[::1] row = out["row"]
        cdef int64_t[::1] last = out["last"], count = out["count"], waiting = out["waiting"]
        with nogil:
            for i in range(n):
                mixed = key_mix(<uint64_t>keys[i], shards.salt)
                entry = find(shards, mixed)
                if entry.value >= 0 and (expired or not is_expired(shards, entry, shards.clock)):
                    row[i], last[i] = entry.value, entry.last
                    if shards.counts != NULL:
                        count[i] = decayed(shards, shards.counts[entry.value], entry.last, shards.clock)
                    continue
                entry = find_candidate(shards, mixed)
                if entry != NULL:
                    last[i], waiting[i] = entry.last, entry.value
        return out

    def state(self, bint expired=True):
        """Return the keys with a row as arrays by name, in order of the mixed key: ``key`` int64, ``row`` int32,
        ``last`` uint32, ``count`` uint32 (LFU's). expired : with the keys that wait for their sweep"""
        cdef Shards* shards = &self.shards
        cdef Py_ssize_t s, i, first = 0, n = len(self)
        self.settle()
        out = {"key": np.empty(n, np.int64), "row": np.empty(n, np.int32), "last": np.empty(n, np.uint32)}
        cdef int64_t[::1] key = out["key"]
        cdef int32_t[::1] row = out["row"]
        cdef uint32_t[::1] last = out["last"]
        cdef uint64_t[::1] memory = np.empty(shards.each[0].num_rows * sizeof(KeyEntry) // 8, np.uint64)
        cdef KeyEntry* block = <KeyEntry*>&memory[0]
        with nogil:
            for s in range(shards.num_shards):
                n = sorted_entries(shards, s, expired, block)
                for i in range(n):
                    key[first + i] = <int64_t>key_unmix(block[i].mixed, shards.salt)
                    row[first + i], last[first + i] = block[i].value, block[i].last
                first += n
        out = {name: array[:first] for name, array in out.items()}
        if shards.counts != NULL:
            out["count"] = np.asarray(<uint32_t[:shards.capacity]>shards.counts)[out["row"]]
        return out

    def candidates(self):
        """Return the candidates as arrays by name, in order of generation and mixed key: ``key`` int64, ``count`` int32,
        ``last`` uint32, ``generation`` int8 (0: the younger)."""
        cdef Shards* shards = &self.shards
        cdef Py_ssize_t s, g, i = 0, n = self.num_waiting
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

    # ---- saving

    def get_state(self):
        """Return everything that decides the future, by key: the arrays of ``state``, those of ``candidates`` as
        ``waiting.…``, and ``numbers``, int64. ``row``, counted among all shares, decides nothing: it only says where the
        table has the rows. Nor do the removed keys, ``removed.…``: they only count."""
        arrays = self.state()
        arrays["row"] += np.int32(self.shards.first_row)
        arrays |= {f"waiting.{name}": array for name, array in self.candidates().items()}
        arrays |= {f"removed.{name}": array for name, array in saved_removed(&self.shards).items()}
        here = arrays["removed.shards"] = self._shards_here()
        arrays["removed.size"] = arrays["removed.size"][: 2 * len(here)]
        numbers = [self.whole_capacity, self.clock, self.shards.epoch, *dict(self.counts).values()]
        arrays["numbers"] = np.array(numbers, np.int64)
        return arrays

    def set_state(self, arrays):
        """Replace everything by what ``get_state`` returned, of a directory of this capacity or a smaller one.

        A share takes its own keys of those of all. Returns the row of every key of ``arrays["key"]``, int32, -1: of another
        share; the saved row, if the capacity is the same. If it raises ValueError or MemoryError, nothing has changed.
        """
        cdef Directory other
        numbers = [int(number) for number in arrays["numbers"]]
        if numbers[0] > self.whole_capacity:
            raise ValueError(f"the saved capacity is {numbers[0]}, this one {self.whole_capacity}: it can only grow")
        lfu = self.shards.counts != NULL
        other = Directory(self.whole_capacity, 0, "", evict="lfu" if lfu else None, half_life=1 if lfu else None,
                          share=self.share)
        other.shards.salt, other.shards.policy, other.shards.chance = (
            self.shards.salt, self.shards.policy, self.shards.chance)
        own, waiting = (self._own(arrays[name]) for name in ("key", "waiting.key"))
        is_same = numbers[0] == self.whole_capacity
        rows = np.full(len(arrays["key"]), -1, np.int32)
        rows[own] = restore_keys(&other.shards, arrays["key"][own], arrays["last"][own],
                                 arrays["row"][own] - np.int32(self.shards.first_row) if is_same else None)
        if is_same and arrays["removed.shards"].tolist() == self._shards_here().tolist() != []:
            restore_removed(&other.shards, arrays["removed.size"], arrays["removed.bits"], arrays["removed.print"])
        if lfu:
            np.asarray(<uint32_t[:self.capacity]>other.shards.counts)[rows[own]] = arrays["count"][own]
        restore_candidates(&other.shards, arrays["waiting.key"][waiting], arrays["waiting.count"][waiting],
                           arrays["waiting.last"][waiting], arrays["waiting.generation"][waiting])
        other.shards.clock, other.shards.epoch = numbers[1], numbers[2]
        self.settle()
        self.shards, other.shards = other.shards, self.shards
        # What became of keys so far is counted once among all shares.
        self.counts = dict(zip(self.counts, numbers[3:] if self.share[0] == 0 else [0] * 6, strict=True))
        return rows

    def _shards_here(self):
        """Numbers among all of the shards here, none if they have no keys: int64 (n,)."""
        if self.share[1] > 1 and self.whole_capacity > 1 and self.capacity == 1:
            return np.zeros(0, np.int64)
        return np.arange(self.shards.first_shard, self.shards.first_shard + self.shards.num_shards)

    def _own(self, keys):
        """Positions of the keys whose shards are here: int64 (n,), ascending; all: a slice."""
        if self.share[1] == 1:
            return slice(None)
        return np.flatnonzero(owners_of(keys, self.shards.salt, self.whole_capacity, self.share[1]) == self.share[0])

    cpdef array(self, dtype, Py_ssize_t n):
        """Return an uninitialized array (n,), whose memory is used again after its last reference."""
        cdef Block block
        cdef Py_ssize_t num_bytes = n * np.dtype(dtype).itemsize
        if n == 0:
            return np.empty(0, dtype)
        block = self.pool.take(num_bytes)
        block.used = num_bytes
        return block.array(dtype, n)

    cdef int settle(self) except -1:
        """Cancel the plan that is neither committed nor cancelled."""
        if self.plan is not None:
            self.plan.cancel()
        return 0

    def _sweep_every(self, int64_t period):
        """For tests: every shard is swept once in so many steps; 0: never."""
        self.shards.policy.sweep_period = period


def directory_bytes(int64_t capacity, bint counts=False):
    """Return the bytes of a directory of this capacity, without candidates. counts : with those of LFU"""
    cdef Shards shards
    shards.policy.evict = EVICT_LFU if counts else 0
    shards_divide(&shards, capacity, 0, 0, 1)
    return shards_bytes(&shards)


# ---- a saved directory: the entries of a shard in order, and keys and candidates back into empty shards


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
