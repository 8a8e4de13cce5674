# What an opening does to each virtual shard: structs and functions that need no GIL.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from penstock.pyx._types cimport id_t
from penstock.pyx.keys.key_shards cimport KeyRank, Shards, key_mix

cdef enum:
    CHUNK = 1 << 14         # keys of a task
    WAITS = 0               # what becomes of an absent key
    ADMITTED = 1
    REJECTED = 2            # admitted, but no row is free
    ABSENT = -1             # in place of a row; an expired key with row r has -2 - r


cdef struct Decision:       # about one shard
    KeyRank* removed        # expired keys by mixed key, then victims by (score, mixed key); value: the row
    Py_ssize_t num_back     # expired keys that occur
    Py_ssize_t num_expired, num_evicted, num_admitted, num_rejected
    Py_ssize_t num_returned  # admitted keys that had a row before; counted when the decision is carried out
    int64_t unadmitted_rows


cdef struct AbsentKey:
    uint64_t mixed
    int32_t position        # among the keys of the opening
    int32_t value           # ABSENT or the row of an expired key; then occurrences so far; then, if admitted, the row


cdef struct Opening:
    Shards* shards
    int64_t clock, step, generation
    bint admit_all, marked  # marked: the rows of the opening are in ``touched``
    bint alone              # one thread does all of the present work
    Py_ssize_t num_keys
    const id_t* keys
    const int64_t* rows     # occurrences of each key, or NULL: 1
    const int64_t* frames
    int64_t* key_rows       # of each key: a row, or below 0
    uint32_t* stamps        # the last clock of every key found, before this one
    int32_t* listed         # positions of the keys to deal, chunk by chunk; NULL: all
    int32_t* in_chunk       # how many each chunk has; -1: not looked at
    int32_t* places         # [chunk, shard]: how many keys to deal, then where the next one goes
    Py_ssize_t num_listed
    AbsentKey* absent_keys  # the absent keys by shard, each from ``first`` to ``last``, by position
    Py_ssize_t* first
    Py_ssize_t* last
    uint8_t* fate           # of absent_keys[j]
    Decision* each


cdef inline Py_ssize_t num_chunks(const Opening* opening) noexcept nogil:
    return opening.num_keys // CHUNK + 1


cdef inline int64_t rows_of(const Opening* opening, Py_ssize_t i) noexcept nogil:
    return 1 if opening.rows == NULL else opening.rows[i]


cdef inline uint64_t mixed_of(const Opening* opening, Py_ssize_t i) noexcept nogil:
    return key_mix(<uint64_t>opening.keys[i], opening.shards.salt)


cdef int decide(const Opening* opening, Py_ssize_t s) noexcept nogil
cdef int change(const Opening* opening, Py_ssize_t s) noexcept nogil
