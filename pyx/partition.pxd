# In which shard an id is, and in which row there.

from libc.stdint cimport uint64_t

from ._types cimport id_t

cdef extern from "row_layout.h" nogil:
    ctypedef struct Divisor:
        uint64_t number
    Divisor divisor_of(uint64_t number)
    uint64_t divided(uint64_t number, Divisor by)


cdef struct Shards:  # of a vocabulary
    bint mod
    id_t longer, remainder  # longer: ids in the first ``remainder`` shards, which are one longer
    Divisor num_shards, quotient, quotient_plus_1


cdef inline Shards shards_of(id_t vocabulary_size, id_t num_shards, bint mod) noexcept nogil:
    cdef Shards shards
    cdef id_t quotient = vocabulary_size // num_shards, remainder = vocabulary_size % num_shards
    shards.mod, shards.longer, shards.remainder = mod, remainder * (quotient + 1), remainder
    shards.num_shards = divisor_of(num_shards)
    shards.quotient, shards.quotient_plus_1 = divisor_of(max(quotient, <id_t>1)), divisor_of(quotient + 1)
    return shards


cdef inline void locate_one(id_t key, const Shards* shards, id_t* shard, id_t* row) noexcept nogil:
    cdef id_t number
    if shards.mod:
        row[0] = divided(key, shards.num_shards)
        shard[0] = key - row[0] * <id_t>shards.num_shards.number
    elif key < shards.longer:
        shard[0] = divided(key, shards.quotient_plus_1)
        row[0] = key - shard[0] * <id_t>shards.quotient_plus_1.number
    else:
        number = divided(key - shards.longer, shards.quotient)
        row[0] = key - shards.longer - number * <id_t>shards.quotient.number
        shard[0] = number + shards.remainder
