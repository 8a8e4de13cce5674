"""Looks up the ids of a frame: the first of two phases in which a frame enters a part of a table, before row_sums.pyx.

Each phase has its own data in the caches, the index or the sums. Where a table has one part, slots are published by a
counter, and the second phase may follow the first on other threads. Where it has several, the rows are first split by
the part that owns their id, stripe by stripe (row_split.h): then a part meets its own rows only, in order.
"""

import numpy as np

from libc.float cimport DBL_MAX, FLT_MAX
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from ._types cimport id_t, index_t
from .id_table cimport NEW_ID, id_buckets_clear, id_buckets_find
from .prefetch cimport prefetch
from .progress cimport ALL_DONE, count_down, is_set, publish, published

cdef extern from "id_map.h" nogil:
    Py_ssize_t id_map_find(uint32_t* entries, uint32_t base, uint32_t run_base, const id_t* ids, long n, id_t* held,
                           uint8_t* fresh, Py_ssize_t num_held, uint32_t* slots, bint* search_first)

cdef extern from "row_split.h" nogil:
    uint64_t signs_outside(int isa, const id_t* ids, long n, uint64_t last)
    void count_rows_of_parts(int isa, const id_t* ids, long n, int shift, bint wide, uint32_t* counts)
    void scatter_rows(int isa, const id_t* ids, long n, int shift, const char* rows, long stride,
                      const index_t* row_index, const float* scales, uint32_t* at, id_t* wide_ids, uint32_t* slots,
                      row_t* to_rows, float* to_scales)

cdef enum:
    AHEAD = 32        # ids whose bit is asked for before it is needed
    # Split rows looked up in one go. While a part is nearly empty, each row of a new id in the same chunk is missed.
    FEW = 512
    # Rows of a stripe: enough for each of 64 parts to have a hundred, and few enough to share among the threads.
    FEWEST_STRIPED = 8192
    MOST_STRIPED = 32768


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


cdef enum:
    SHARE = 16  # the share of a part begins at a multiple of it, so that its sums begin at a cache line


cdef Py_ssize_t space_for(Py_ssize_t num_ids, Py_ssize_t num_parts) noexcept nogil:
    """The size of a space in which so many ids fit, however they are spread over the parts.

    One more for each part: a look-up in the map writes one id beyond the end.
    """
    return num_ids + num_parts * (1 + SHARE)


cdef bint make_room(Part* parts, Py_ssize_t num_parts, const Py_ssize_t* num_rows, const Space* spare,
                    Py_ssize_t row_bytes) noexcept nogil:
    """Give each part room for its rows. Returns whether what is held has moved to the spare space, because one had none.

    num_rows : of each part; spare : as large as ``space_for`` says for these and the ids that are held
    """
    cdef Py_ssize_t p, needed, first = 0, held = 0, total = 0
    cdef double spread = 1
    cdef bint fit = True
    cdef Part* part
    for p in range(num_parts):
        needed = parts[p].num_ids + num_rows[p]
        fit = fit and needed <= parts[p].room
        held += parts[p].num_ids
        total += needed
    if fit:
        return False
    if held or num_parts == 1:
        # What is left over is spread, so that the next frames find room.
        spread = <double>(spare.num_ids - space_for(0, num_parts)) / max(total, <Py_ssize_t>1)
    for p in range(num_parts):
        part = &parts[p]
        part.room = max(<Py_ssize_t>((part.num_ids + num_rows[p]) * spread), part.num_ids + num_rows[p])
        if part.num_ids:
            memcpy(spare.ids + first, part.ids, part.num_ids * sizeof(id_t))
            memcpy(spare.first_seen + first, part.first_seen, part.num_ids)
            if row_bytes:
                memcpy(spare.sums + first * row_bytes, part.sums, part.num_ids * row_bytes)
            if spare.marks != NULL:
                memcpy(spare.marks + first, part.marks, part.num_ids * sizeof(Mark))
            if spare.rows != NULL:
                memcpy(spare.rows + first, part.rows, part.num_ids * sizeof(index_t))
        part.ids, part.first_seen, part.sums = spare.ids + first, spare.first_seen + first, spare.sums + first * row_bytes
        part.marks = spare.marks + first if spare.marks != NULL else NULL
        part.rows = spare.rows + first if spare.rows != NULL else NULL
        first = (first + part.room + SHARE) // SHARE * SHARE
    return True


cdef int part_find(Part* part, const Vocabulary* vocabulary, const Frame* frame, const int* stop) noexcept nogil:
    """Find the slots of the rows of a table with one part; room for all of them has been made.

    stop : set where another task has found a bad row
    Returns 1 at an id outside the vocabulary; what has been found by then is in the index.
    """
    cdef const Source* sources = frame.sources
    cdef Py_ssize_t s, start, num_chunk, num_found = 0
    for s in range(frame.num_sources):
        start = 0
        while start < sources[s].num_rows:
            if is_set(stop):
                return 0
            num_chunk = min(<Py_ssize_t>CHUNK, sources[s].num_rows - start)
            if outside(frame.isa, sources[s].ids + start, num_chunk, vocabulary.size):
                return 1
            find(part, vocabulary, sources[s].ids + start, num_chunk, part.slots + num_found, frame.number)
            num_found += num_chunk
            publish(&part.progress, num_found)
            start += num_chunk
    publish(&part.progress, num_found + ALL_DONE)
    return 0


cdef bint outside(int isa, const id_t* ids, Py_ssize_t n, id_t vocabulary_size) noexcept nogil:
    """Whether one of the ids is outside the vocabulary, if that is known."""
    return vocabulary_size and <bint>(signs_outside(isa, ids, n, <uint64_t>vocabulary_size - 1) >> 63)


cdef void split_begin(Split* split, Py_ssize_t num_rows, Py_ssize_t num_parts) noexcept nogil:
    """A frame begins: no stripe is split."""
    cdef Py_ssize_t part
    split.num_rows, split.num_parts, split.moved = num_rows, num_parts, False
    split.rows_per_stripe = max(<Py_ssize_t>FEWEST_STRIPED, min(num_rows // num_parts, <Py_ssize_t>MOST_STRIPED))
    split.num_stripes = (num_rows + split.rows_per_stripe - 1) // split.rows_per_stripe
    split.num_left = split.num_stripes + 1 if split.num_stripes else 0
    for part in range(num_parts):
        split.order[part] = part


def split_rows(const id_t[::1] ids not None, Py_ssize_t num_parts, bint wide, int isa):
    """Split the rows of one stripe by part, as ``split_stripe`` does. Twin: ``reference.split_rows``.

    ids : int64, shape (n,), at least one; num_parts : a power of two from 2 to 64
    wide : whether ids may be any int64; else they are below 2**32
    isa : which of ``accumulator.targets``, from the last one on
    Returns, part by part, ids and numbers of the rows, int64 (n,), and where the rows of each part end, uint32 (num_parts,).
    """
    cdef Py_ssize_t n = ids.shape[0]
    cdef int shift = shift_of(num_parts)
    out_ids, out_rows, out_slots = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.uint32)
    ends = np.zeros(num_parts, np.uint32)
    cdef id_t[::1] wide_ids = out_ids
    cdef index_t[::1] rows = out_rows
    cdef uint32_t[::1] slots = out_slots, at = ends
    cdef const uint8_t[::1] table = np.zeros(n, np.uint8)  # a byte for each row
    count_rows_of_parts(isa, &ids[0], n, shift, wide, &at[0])
    begin_at(&at[0], num_parts, 0)
    scatter_rows(isa, &ids[0], n, shift, <const char*>&table[0], 1, NULL, NULL, &at[0], &wide_ids[0] if wide else NULL,
                 &slots[0], <row_t*>&rows[0], NULL)
    return out_ids if wide else out_slots.astype(np.int64), out_rows - <index_t>&table[0], ends


cdef int shift_of(Py_ssize_t num_parts) noexcept nogil:
    """By how much a mixed id of 32 bits is shifted to the number of its part."""
    cdef int shift = 32
    while num_parts >> (32 - shift) > 1:
        shift -= 1
    return shift


cdef void begin_at(uint32_t* at, Py_ssize_t num_parts, uint32_t place) noexcept nogil:
    """Replace the number of rows of each part by the place of its first one."""
    cdef Py_ssize_t part
    cdef uint32_t count
    for part in range(num_parts):
        count, at[part] = at[part], place
        place += count


cdef int split_stripe(Split* split, const Vocabulary* vocabulary, const Frame* frame, Py_ssize_t stripe) noexcept nogil:
    """Split the rows of a stripe by part. Returns 1 at an id outside the vocabulary; the stripe is then not split.

    Also if ids have changed between the two passes, because their owner wrote to them meanwhile: the memory for the
    split rows has room for one stripe more, so that nothing is written outside it.
    """
    cdef uint32_t* at = split.ends + stripe * split.num_parts    # counts first, then where the next rows go
    cdef Py_ssize_t begin = stripe * split.rows_per_stripe, end = min(begin + split.rows_per_stripe, split.num_rows)
    cdef Py_ssize_t source, row, first, n
    cdef const Source* s
    cdef uint32_t[MOST_PARTS + 1] begins
    cdef bint scatters
    cdef int shift = shift_of(split.num_parts)
    memset(at, 0, split.num_parts * sizeof(uint32_t))
    for scatters in range(2):
        if scatters:
            begin_at(at, split.num_parts, <uint32_t>begin)
            memcpy(begins, at, split.num_parts * sizeof(uint32_t))
        row, source = begin, source_of(split.starts, frame.num_sources, begin)
        while row < end:
            s, first = &frame.sources[source], row - split.starts[source]
            n = min(end, split.starts[source + 1]) - row
            if scatters:
                scatter_rows(frame.isa, s.ids + first, n, shift, s.rows + (0 if s.row_index != NULL else first * s.stride),
                             s.stride, s.row_index + first if s.row_index != NULL else NULL,
                             s.scales + first if s.scales != NULL else NULL, at, split.ids, split.slots, split.rows,
                             split.scales)
            elif outside(frame.isa, s.ids + first, n, vocabulary.size):
                return 1
            else:
                count_rows_of_parts(frame.isa, s.ids + first, n, shift, split.ids != NULL, at)
            row += n
            source += 1
    begins[split.num_parts] = <uint32_t>end
    for source in range(split.num_parts):
        if at[source] != begins[source + 1]:
            return 1
    if count_down(&split.num_left) == 1:
        end_split(split)
        publish(&split.num_left, 0)
    return 0


cdef Py_ssize_t source_of(const index_t* starts, Py_ssize_t num_sources, Py_ssize_t row) noexcept nogil:
    cdef Py_ssize_t low = 0, high = num_sources, middle
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= row:
            low = middle
        else:
            high = middle
    return low


cdef void end_split(Split* split) noexcept nogil:
    """All rows are split: make room for those of each part, and order the parts.

    The one with the most rows comes first: that of a hot id must not be begun last.
    """
    cdef Py_ssize_t[MOST_PARTS] num_rows
    cdef Py_ssize_t part, stripe, i
    for part in range(split.num_parts):
        num_rows[part] = 0
        for stripe in range(split.num_stripes):
            num_rows[part] += split.ends[stripe * split.num_parts + part] - begin_of(split, stripe, part)
        i = part
        while i and num_rows[split.order[i - 1]] < num_rows[part]:
            split.order[i] = split.order[i - 1]
            i -= 1
        split.order[i] = part
    split.moved = make_room(split.parts, split.num_parts, num_rows, &split.spare, split.row_bytes)


cdef inline Py_ssize_t begin_of(const Split* split, Py_ssize_t stripe, Py_ssize_t number) noexcept nogil:
    """Where the rows of a part begin in a stripe."""
    return split.ends[stripe * split.num_parts + number - 1] if number else stripe * split.rows_per_stripe


cdef bint is_split(const Split* split) noexcept nogil:
    """Whether all rows are split, so that every part may add its own."""
    return published(&split.num_left) == 0


cdef Place first_place(const Split* split, Py_ssize_t number) noexcept nogil:
    cdef Place place
    place.stripe, place.at = 0, begin_of(split, 0, number) if split.num_stripes else 0
    return place


cdef Py_ssize_t neighbours(const Split* split, Py_ssize_t number, Place* place, Py_ssize_t most) noexcept nogil:
    """Return how many of the next rows of a part lie side by side; 0: there are no more.

    place : INOUT of the first of them, which the caller moves on by so many as it takes
    """
    cdef Py_ssize_t n
    while place.stripe < split.num_stripes:
        n = split.ends[place.stripe * split.num_parts + number] - place.at
        if n:
            return min(n, most)
        place.stripe += 1
        if place.stripe < split.num_stripes:
            place.at = begin_of(split, place.stripe, number)
    return 0


cdef void part_find_split(Part* part, const Vocabulary* vocabulary, const Split* split, Py_ssize_t number, index_t frame,
                          const int* stop) noexcept nogil:
    """Find the slots of the split rows of part ``number``; room for all of them has been made. stop : as above"""
    cdef id_t[FEW] ids
    cdef uint32_t[FEW] slots
    cdef Place place = first_place(split, number), begin
    cdef Py_ssize_t i, n, num_ids
    while not is_set(stop):
        num_ids, begin = 0, place
        n = neighbours(split, number, &place, FEW)
        while n:
            if split.ids != NULL:
                memcpy(ids + num_ids, split.ids + place.at, n * sizeof(id_t))
            else:
                for i in range(n):
                    ids[num_ids + i] = split.slots[place.at + i]
            place.at += n
            num_ids += n
            n = neighbours(split, number, &place, FEW - num_ids) if num_ids < FEW else 0
        if not num_ids:
            break
        find(part, vocabulary, ids, num_ids, slots, frame)
        place, i = begin, 0
        while i < num_ids:
            n = neighbours(split, number, &place, num_ids - i)
            memcpy(split.slots + place.at, slots + i, n * sizeof(uint32_t))
            place.at += n
            i += n


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
