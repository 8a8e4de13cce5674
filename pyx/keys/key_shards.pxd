# Virtual shards: the memory of a directory, as structs and functions that need no GIL.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from penstock.pyx._types cimport id_t

cdef extern from "keys/key_table.h" nogil:
    ctypedef struct KeyEntry:
        uint64_t mixed
        int32_t value       # a row, or of a candidate: how often it occurred; below 0: empty
        uint32_t last       # the clock when the key occurred last
    ctypedef struct KeyRank:
        uint64_t mixed
        uint32_t score
        int32_t value
    uint64_t key_mix(uint64_t key, uint64_t salt)
    uint64_t key_unmix(uint64_t mixed, uint64_t salt)
    size_t key_home(uint64_t mixed, int shard_bits, size_t slots)
    KeyEntry* key_find(KeyEntry* entries, size_t slots, int shard_bits, uint64_t mixed)
    KeyEntry* key_find_from(KeyEntry* entries, size_t slots, uint64_t mixed, size_t slot)
    void key_clear(KeyEntry* entries, size_t slots)
    void key_remove(KeyEntry* entries, size_t slots, int shard_bits, KeyEntry* entry)
    void rank_nearly_sorted(KeyRank* ranks, int64_t n)
    void rank_lowest(KeyRank* ranks, int64_t n, int64_t count)

cdef extern from "keys/removed_keys.h" nogil:
    ctypedef struct RemovedKeys:
        uint32_t* prints
        size_t slots, size
    bint removed_has(const RemovedKeys* removed, int shard_bits, uint64_t mixed)
    int removed_reserve(RemovedKeys* removed, size_t num_keys)
    void removed_add(RemovedKeys* lately, RemovedKeys* before, size_t most, int shard_bits, uint64_t mixed)
    size_t removed_bytes_of_bits(const RemovedKeys* removed)
    void removed_save(const RemovedKeys* removed, unsigned char* bits, uint32_t* prints)
    int removed_restore(RemovedKeys* removed, const unsigned char* bits, const uint32_t* prints, size_t size)

cdef extern from "philox.h" nogil:
    ctypedef struct PhiloxKey:
        uint64_t low, high
    void philox_block(uint64_t low, uint64_t high, PhiloxKey key, uint64_t* out)
    double philox_unit(uint64_t word)

cdef enum:
    AHEAD = 16              # keys whose entry is requested before it is needed
    FAR_AHEAD = 40          # the same, where few instructions are between two keys
    MOST_SHARDS = 1024
    ROWS_PER_SHARD = 4096   # at least, if there are several shards
    EVICT_LRU = 1
    EVICT_LFU = 2
# The largest clock, and the largest count: one less than the largest uint32.
cdef int64_t MAX_CLOCK


cdef struct Candidates:     # one generation of a shard: key → how often it occurred
    KeyEntry* entries
    size_t slots, size


cdef struct KeyCounts:      # what became of keys; unadmitted_rows: gradient rows of keys that were not admitted
    int64_t admitted, expired, evicted, returned, rejected, unadmitted_rows     # as in KeyReport and saved states


cdef struct Shard:
    int32_t first_row, num_rows, num_free   # its rows follow first_row; those free are the first of its stack
    int64_t generation      # swaps of ``young`` and ``old`` that this shard has taken part in
    Candidates young, old
    RemovedKeys lately, before  # the last num_rows keys that lost their row at least, all of the last opening included
    KeyCounts counts        # since the directory was created


cdef struct Policy:
    int32_t min_count
    bint by_frames, by_chance
    double probability
    int64_t forget_after, expire_after, half_life   # below 0: never
    int evict
    int64_t sweep_period    # 0: no sweeps


cdef struct Shards:
    int64_t capacity, num_shards
    size_t slots            # of each shard
    int bits                # of a mixed key, which are the number of its shard among all
    uint64_t kept           # these bits of that number are the shard's here: fewer than all in a sample
    int64_t first_shard, first_row  # among all: those of a share begin here
    uint64_t salt
    PhiloxKey chance
    KeyEntry* entries
    id_t* keys              # of every row; defined where the row is in use
    int32_t* free_rows      # a stack for every shard, in the place of its rows
    uint32_t* counts        # of every row, for LFU; else NULL
    unsigned char* touched  # a bit per row, all 0 between plans; NULL until needed
    Shard* each
    Policy policy
    int64_t clock           # of the last opening; expiry is tested against it
    int64_t generation      # swaps of the candidates so far
    int64_t epoch           # of the last opening: its step by ``forget_after``
    int64_t newest          # the latest clock in any entry
    bint mostly_new         # of the last opening: more keys were absent than present


cdef inline Py_ssize_t shard_of(const Shards* shards, uint64_t mixed) noexcept nogil:
    """The shard of a key here; the first one of a key of another share, which has no row here."""
    cdef uint64_t s = (mixed >> (64 - shards.bits) & shards.kept) - <uint64_t>shards.first_shard if shards.bits else 0
    return <Py_ssize_t>s if s < <uint64_t>shards.num_shards else 0


cdef inline size_t home_of(const Shards* shards, uint64_t mixed) noexcept nogil:
    return <size_t>shard_of(shards, mixed) * shards.slots + key_home(mixed, shards.bits, shards.slots)


cdef inline KeyEntry* find(const Shards* shards, uint64_t mixed) noexcept nogil:
    return key_find(shards.entries + <size_t>shard_of(shards, mixed) * shards.slots, shards.slots, shards.bits, mixed)


cdef inline bint is_expired(const Shards* shards, const KeyEntry* entry, int64_t clock) noexcept nogil:
    return shards.policy.expire_after >= 0 and clock - <int64_t>entry.last > shards.policy.expire_after


cdef inline uint32_t decayed(const Shards* shards, uint32_t count, int64_t last, int64_t clock) noexcept nogil:
    """A count at the clock: halved at every multiple of the half-life since ``last``."""
    cdef int64_t halvings = clock // shards.policy.half_life - last // shards.policy.half_life
    return count if halvings <= 0 else 0 if halvings > 31 else count >> halvings


cdef void shards_divide(Shards* shards, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil
cdef size_t shards_bytes(const Shards* shards) noexcept nogil
cdef int shards_init(Shards* shards, int64_t capacity, int sample_bits, int64_t rank, int64_t count) noexcept nogil
cdef void shards_free(Shards* shards) noexcept nogil
cdef void age(Shards* shards, Shard* shard, int64_t generation) noexcept nogil
cdef KeyEntry* find_candidate(Shards* shards, uint64_t mixed) noexcept nogil
cdef KeyEntry* candidate_of(const Candidates* candidates, int bits, uint64_t mixed) noexcept nogil
cdef void candidates_clear(Candidates* candidates) noexcept nogil
cdef int candidates_reserve(Candidates* candidates, size_t num_keys, int bits) noexcept nogil
