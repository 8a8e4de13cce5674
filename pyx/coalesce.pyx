"""Looks up the ids of a frame: the first of two phases in which a frame enters a part of a table, before row_sums.pyx.

Each phase has its own data in the caches, the index or the sums. Slots are published by a counter, and the second phase
may follow the first on other threads. Where a table has several parts, ids are assigned to them in
blocks of 512 neighbours, so that two threads never write one cache line of the map or of the bits that count ids, and
every part walks all ids.
"""

from libc.float cimport DBL_MAX, FLT_MAX
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from ._types cimport id_t, index_t
from .id_table cimport NEW_ID, id_buckets_clear, id_buckets_find
from .prefetch cimport prefetch
from .progress cimport ALL_DONE, is_set, publish

cdef extern from "id_map.h" nogil:
    Py_ssize_t id_map_find(uint32_t* entries, uint32_t base, uint32_t run_base, const id_t* ids, long n, id_t* held,
                           uint8_t* fresh, Py_ssize_t num_held, uint32_t* slots, bint* search_first)

cdef enum:
    NEIGHBOURS = 512  # ids whose bits are in one cache line
    AHEAD = 32        # ids whose bit is asked for before it is needed


cdef double harmless(double largest, Py_ssize_t num_rows, bint wide) noexcept nogil:
    """Up to which magnitude of its values no row of a frame can take a sum out of the finite range.

    largest : magnitude of the sums before the frame; num_rows : of the frame
    A rounded addition changes a sum by at most twice the magnitude of what is added.
    """
    return ((DBL_MAX if wide else FLT_MAX) / 2 - largest) / (2.0 * max(num_rows, <Py_ssize_t>1))


cdef void part_begin(Part* part) noexcept nogil:
    """A frame begins: no slot is known, and no row is folded."""
    cdef int group
    part.progress, part.all_taken, part.lock, part.num_folding, part.taken = 0, 0, 0, 0, 0
    for group in range(NUM_GROUPS):
        part.next_rows[group] = 0


cdef int part_find(Part* part, const Vocabulary* vocabulary, const Frame* frame, Py_ssize_t number,
                   Py_ssize_t num_parts, const int* stop) noexcept nogil:
    """Find the slots of the rows whose ids part ``number`` owns; room for all of them has been made.

    stop : set where another task has found a bad row
    Returns 1 at an id outside the vocabulary; what has been found by then is in the index.
    """
    cdef const Source* sources = frame.sources
    cdef id_t[CHUNK] picked
    cdef const id_t* ids
    cdef Py_ssize_t s, start, num_chunk, num_picked, first = 0, num_found = 0
    for s in range(frame.num_sources):
        start = 0
        while start < sources[s].num_rows:
            if is_set(stop):
                return 0
            num_chunk = min(<Py_ssize_t>CHUNK, sources[s].num_rows - start)
            ids, num_picked = sources[s].ids + start, num_chunk
            if outside(ids, num_chunk, vocabulary.size):
                return 1
            if num_parts > 1:
                num_picked = pick(ids, num_chunk, first + start, number, num_parts, picked, part.picked + num_found)
                ids = picked
            find(part, vocabulary, ids, num_picked, part.slots + num_found, frame.number)
            num_found += num_picked
            publish(&part.progress, num_found)
            start += num_chunk
        first += sources[s].num_rows
    publish(&part.progress, num_found + ALL_DONE)
    return 0


cdef bint outside(const id_t* ids, Py_ssize_t n, id_t vocabulary_size) noexcept nogil:
    # The sign bit of id, or of last - id: no branch in the loop, so that the compiler can vectorise it.
    cdef uint64_t signs = 0
    cdef uint64_t last = <uint64_t>vocabulary_size - 1
    cdef Py_ssize_t i
    if vocabulary_size == 0:
        return False
    for i in range(n):
        signs |= <uint64_t>ids[i] | (last - <uint64_t>ids[i])
    return <bint>(signs >> 63)


cdef Py_ssize_t pick(const id_t* ids, Py_ssize_t n, Py_ssize_t first, Py_ssize_t number, Py_ssize_t num_parts,
                     id_t* picked, uint32_t* rows) noexcept nogil:
    """The ids that part ``number`` owns, and which rows of the frame they are, in order; the first one is ``first``."""
    cdef Py_ssize_t i, num_picked = 0
    cdef uint64_t block
    for i in range(n):
        block = <uint64_t>ids[i] // NEIGHBOURS * <uint64_t>0x9E3779B97F4A7C15
        picked[num_picked] = ids[i]
        rows[num_picked] = <uint32_t>(first + i)
        # No branch: which ids are whose cannot be predicted.
        num_picked += ((block >> 32) & <uint64_t>(num_parts - 1)) == <uint64_t>number
    return num_picked


cdef void find(Part* part, const Vocabulary* vocabulary, const id_t* ids, Py_ssize_t n, uint32_t* slots,
               index_t frame) noexcept nogil:
    cdef Py_ssize_t i, known = part.num_ids
    if vocabulary.entries != NULL:
        part.num_ids = id_map_find(vocabulary.entries, vocabulary.base, vocabulary.run_base, ids, n, part.ids,
                                   part.first_seen, known, slots, &part.search_first)
    else:
        id_buckets_find(&part.buckets, ids, n, part.ids, slots)
        part.num_ids = part.buckets.num_ids
        for i in range(known, part.num_ids):
            part.first_seen[i] = OLD
            if vocabulary.seen != NULL:
                if i + AHEAD < part.num_ids:
                    prefetch(&vocabulary.seen[part.ids[i + AHEAD] >> 3])
                part.first_seen[i] = OLD if see(vocabulary.seen, part.ids[i]) else FRESH
    for i in range(known, part.num_ids):
        part.num_distinct += part.first_seen[i]
    if part.marks != NULL:
        mark(part, slots, n, frame)
    if part.rows != NULL:
        count_rows(part, slots, n)
    if part.num_carried:
        count_carried(part, vocabulary, slots, n)


cdef inline bint see(uint8_t* seen, id_t key) noexcept nogil:
    """Set the bit of an id. Returns what it was. Parts have blocks of ids: no two write one byte."""
    cdef uint8_t bit = 1 << (key & 7)
    cdef bint was = (seen[key >> 3] & bit) != 0
    seen[key >> 3] |= bit
    return was


cdef void mark(Part* part, const uint32_t* slots, Py_ssize_t n, index_t frame) noexcept nogil:
    cdef Py_ssize_t k
    cdef Mark* id_mark
    for k in range(n):
        id_mark = &part.marks[slots[k] & ~<uint32_t>NEW_ID]
        if slots[k] & NEW_ID:
            id_mark.frame, id_mark.count = frame, 1
        else:
            id_mark.count += id_mark.frame != frame
            id_mark.frame = frame


cdef void count_rows(Part* part, const uint32_t* slots, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if slots[k] & NEW_ID:
            part.rows[slots[k] & ~<uint32_t>NEW_ID] = 1
        else:
            part.rows[slots[k]] += 1


cdef void count_carried(Part* part, const Vocabulary* vocabulary, const uint32_t* slots, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if slots[k] < part.num_carried and part.first_seen[slots[k]] == CARRIED:
            part.first_seen[slots[k]] = FRESH
            part.num_distinct += 1
            if vocabulary.seen != NULL:
                see(vocabulary.seen, part.ids[slots[k]])


cdef void part_carry(Part* part) noexcept nogil:
    """A new run is counted from here: what is held counts only where it comes again."""
    cdef Py_ssize_t i
    part.num_carried, part.num_distinct = part.num_ids, 0
    for i in range(part.num_ids):
        part.first_seen[i] = CARRIED


cdef void part_undo(Part* part, const Vocabulary* vocabulary) noexcept nogil:
    """As if what is held had never been added. Only where nothing was held before it."""
    cdef Py_ssize_t i
    for i in range(part.num_ids):
        if vocabulary.entries != NULL:
            vocabulary.entries[part.ids[i]] = vocabulary.run_base if part.first_seen[i] == OLD else 0
        elif vocabulary.seen != NULL and part.first_seen[i] == FRESH:
            vocabulary.seen[part.ids[i] >> 3] &= ~(1 << (part.ids[i] & 7))
        part.num_distinct -= part.first_seen[i] == FRESH
    id_buckets_clear(&part.buckets)
    part.num_ids, part.largest = 0, 0


cdef void part_clear(Part* part, const Vocabulary* vocabulary) noexcept nogil:
    """Nothing is held any more; what was counted stays so."""
    cdef Py_ssize_t i
    if vocabulary.entries != NULL:
        for i in range(part.num_carried):
            if part.first_seen[i] == CARRIED:
                vocabulary.entries[part.ids[i]] = 0
    id_buckets_clear(&part.buckets)
    part.num_ids = part.num_carried = 0
    part.largest = 0
