"""Sums the rows of the ids that one owner has: every owner walks all rows in order and skips those of others.

A table's ids are dealt to owners in blocks of 16 neighbours, so that two threads never write one cache
line of the direct map, and the sum of an id is one left fold whatever the number of owners. Per chunk of
rows: pick the owner's, look them up (the map's lines asked for ahead), fold (the sums' lines asked for
ahead). A chunk's pointers and indices stay in the first-level cache.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from ._types cimport id_t, index_t
from .id_table cimport Table, prefetch, slot_of, table_clear, table_insert, table_widen

cdef extern from "row_kernels.h":
    int fold_rows_f32(float* sums, long dim, const index_t* order, const float** rows, const float* scales,
                      long n) nogil
    int fold_rows_f64(double* sums, long dim, const index_t* order, const double** rows, long n) nogil
    int nonfinite_rows_f32(const char* rows, long stride, const index_t* row_index, const float* scales, long n,
                           long dim) nogil
    int nonfinite_rows_f64(const char* rows, long stride, const index_t* row_index, long n, long dim) nogil

cdef enum:
    NEIGHBOURS = 16  # entries of the direct map in a cache line
    AHEAD = 32       # ids whose entry is asked for before it is needed


cdef int part_add(Part* part, const Index* index, const Source* sources, Py_ssize_t num_sources, Py_ssize_t dim,
                  bint wide, bint strict, index_t frame, Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil:
    """Add the rows of the ids that part ``number`` owns; room for all of them has been made.

    wide : float64, not float32
    strict : stop at a value that is not finite; then, or at an id outside the vocabulary, 1 is returned, and
        what has been added by then is there
    """
    cdef id_t[CHUNK] picked
    cdef const id_t* ids
    cdef row_t[CHUNK] rows
    cdef float[CHUNK] picked_scales
    cdef const float* scales
    cdef index_t[CHUNK] order
    cdef Py_ssize_t s, start, num_chunk, num_mine
    cdef bint nonfinite
    for s in range(num_sources):
        start = 0
        while start < sources[s].num_rows:
            num_chunk = min(<Py_ssize_t>CHUNK, sources[s].num_rows - start)
            if outside(sources[s].ids + start, num_chunk, index.vocabulary_size):
                return 1
            scales = sources[s].scales + start if sources[s].scales != NULL else NULL
            if num_parts == 1:
                ids, num_mine = sources[s].ids + start, num_chunk
                point(&sources[s], start, num_chunk, rows)
            else:
                ids = picked
                num_mine = pick(&sources[s], start, num_chunk, number, num_parts, picked, rows)
                if scales != NULL:
                    pick_scales(&sources[s], start, num_chunk, number, num_parts, picked_scales)
                    scales = picked_scales
            if index.entries != NULL:
                find_direct(part, index, ids, num_mine, order)
            else:
                find_hashed(part, index, ids, num_mine, order)
            if part.marks != NULL:
                mark(part, order, num_mine, frame)
            if part.rows != NULL:
                count_rows(part, order, num_mine)
            if part.num_carried:
                count_carried(part, index, order, num_mine)
            if dim == 0:
                nonfinite = False
            elif wide:
                nonfinite = fold_rows_f64(<double*>part.sums, dim, order, <const double**>rows, num_mine)
            else:
                nonfinite = fold_rows_f32(<float*>part.sums, dim, order, <const float**>rows, scales, num_mine)
            if nonfinite and strict:
                return 1
            start += num_chunk
    return 0


cdef int part_check(const Index* index, const Source* sources, Py_ssize_t num_sources, Py_ssize_t dim, bint wide,
                    Py_ssize_t number, Py_ssize_t num_parts) noexcept nogil:
    """Whether an id lies outside the vocabulary or a value is not finite, in share ``number`` of the rows."""
    cdef Py_ssize_t s, first, n
    cdef const Source* source
    cdef const char* rows
    cdef const index_t* row_index
    cdef bint nonfinite
    for s in range(num_sources):
        source = &sources[s]
        first = source.num_rows * number // num_parts
        n = source.num_rows * (number + 1) // num_parts - first
        if outside(source.ids + first, n, index.vocabulary_size):
            return 1
        rows, row_index = source.rows, NULL
        if source.row_index != NULL:
            row_index = source.row_index + first
        else:
            rows += first * source.stride
        if wide:
            nonfinite = nonfinite_rows_f64(rows, source.stride, row_index, n, dim)
        else:
            nonfinite = nonfinite_rows_f32(rows, source.stride, row_index,
                                           source.scales + first if source.scales != NULL else NULL, n, dim)
        if nonfinite:
            return 1
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


cdef void point(const Source* source, Py_ssize_t start, Py_ssize_t n, const char** rows) noexcept nogil:
    """Where the rows of a chunk lie, all of them."""
    cdef Py_ssize_t i
    if source.row_index == NULL:
        for i in range(n):
            rows[i] = source.rows + (start + i) * source.stride
    else:
        for i in range(n):
            rows[i] = source.rows + source.row_index[start + i] * source.stride


cdef inline bint is_of_part(id_t key, uint64_t mask, Py_ssize_t number) noexcept nogil:
    """Whether an id is of part ``number`` of mask + 1."""
    return ((<uint64_t>key // NEIGHBOURS) & mask) == <uint64_t>number


cdef Py_ssize_t pick(const Source* source, Py_ssize_t start, Py_ssize_t n, Py_ssize_t number, Py_ssize_t num_parts,
                     id_t* ids, const char** rows) noexcept nogil:
    """The rows of a chunk that part ``number`` owns, in order."""
    cdef Py_ssize_t i, num_mine = 0
    cdef uint64_t mask = num_parts - 1
    cdef id_t key
    for i in range(start, start + n):
        key = source.ids[i]
        ids[num_mine] = key
        rows[num_mine] = source.rows + (i if source.row_index == NULL else source.row_index[i]) * source.stride
        # No branch: which ids are whose cannot be predicted.
        num_mine += is_of_part(key, mask, number)
    return num_mine


cdef void pick_scales(const Source* source, Py_ssize_t start, Py_ssize_t n, Py_ssize_t number, Py_ssize_t num_parts,
                      float* scales) noexcept nogil:
    """The factors of the rows that ``pick`` picks."""
    cdef Py_ssize_t i, num_mine = 0
    for i in range(start, start + n):
        scales[num_mine] = source.scales[i]
        num_mine += is_of_part(source.ids[i], num_parts - 1, number)


cdef void find_direct(Part* part, const Index* index, const id_t* ids, Py_ssize_t n, index_t* order) noexcept nogil:
    """order[k] : the dense index of ids[k], ~index where it is new."""
    cdef uint32_t* entries = index.entries
    cdef uint32_t base = index.base, run_base = index.run_base, entry
    cdef id_t* held = part.ids
    cdef uint8_t* first_seen = part.first_seen
    cdef Py_ssize_t k, num_ids = part.num_ids, num_distinct = 0
    cdef index_t found, mask
    for k in range(n):
        if k + AHEAD < n:
            prefetch(&entries[ids[k + AHEAD]])
        entry = entries[ids[k]]
        mask = -<index_t>(entry < base)  # all ones where the id is new
        found = <index_t>(entry - base)
        found ^= (found ^ num_ids) & mask
        # No branch, it would often be mispredicted: written whether new or not, one beyond the end.
        held[num_ids] = ids[k]
        first_seen[num_ids] = entry < run_base
        num_distinct += entry < run_base
        entries[ids[k]] = base + <uint32_t>found
        order[k] = found ^ mask
        num_ids -= mask
    part.num_ids = num_ids
    part.num_distinct += num_distinct


cdef void find_hashed(Part* part, const Index* index, const id_t* ids, Py_ssize_t n, index_t* order) noexcept nogil:
    cdef Py_ssize_t k
    cdef index_t found
    cdef bint is_new, fresh
    table_widen(&part.table, part.ids, n)
    for k in range(n):
        if k + AHEAD < n:
            prefetch(&part.table.slots[slot_of(&part.table, ids[k + AHEAD])])
        found = table_insert(&part.table, ids[k], &is_new)
        order[k] = found ^ -<index_t>is_new
        if is_new:
            fresh = index.seen != NULL and not see(index.seen, ids[k])
            part.ids[found] = ids[k]
            part.first_seen[found] = fresh
            part.num_distinct += fresh
    part.num_ids = part.table.num_ids


cdef inline bint see(uint8_t* seen, id_t key) noexcept nogil:
    """Set the bit of an id. Returns what it was. Owners have blocks of 16 ids: no two write one byte."""
    cdef uint8_t bit = 1 << (key & 7)
    cdef bint was = (seen[key >> 3] & bit) != 0
    seen[key >> 3] |= bit
    return was


cdef void mark(Part* part, const index_t* order, Py_ssize_t n, index_t frame) noexcept nogil:
    cdef Py_ssize_t k
    cdef Mark* found
    for k in range(n):
        if order[k] < 0:
            found = &part.marks[~order[k]]
            found.frame, found.count = frame, 1
        else:
            found = &part.marks[order[k]]
            found.count += found.frame != frame
            found.frame = frame


cdef void count_rows(Part* part, const index_t* order, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if order[k] < 0:
            part.rows[~order[k]] = 1
        else:
            part.rows[order[k]] += 1


cdef void count_carried(Part* part, const Index* index, const index_t* order, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(n):
        if 0 <= order[k] < part.num_carried and part.first_seen[order[k]] == CARRIED:
            part.first_seen[order[k]] = FRESH
            part.num_distinct += 1
            if index.seen != NULL:
                see(index.seen, part.ids[order[k]])


cdef void part_carry(Part* part) noexcept nogil:
    """A new run is counted from here: what is held counts only where it comes again."""
    cdef Py_ssize_t i
    part.num_carried, part.num_distinct = part.num_ids, 0
    for i in range(part.num_ids):
        part.first_seen[i] = CARRIED


cdef void part_undo(Part* part, const Index* index) noexcept nogil:
    """As if what is held had never been added. Only where nothing was held before it."""
    cdef Py_ssize_t i
    for i in range(part.num_ids):
        if index.entries != NULL:
            index.entries[part.ids[i]] = index.run_base if part.first_seen[i] == OLD else 0
        elif index.seen != NULL and part.first_seen[i] == FRESH:
            index.seen[part.ids[i] >> 3] &= ~(1 << (part.ids[i] & 7))
        part.num_distinct -= part.first_seen[i] == FRESH
    table_clear(&part.table)
    part.num_ids = 0


cdef void part_clear(Part* part, const Index* index) noexcept nogil:
    """Nothing is held any more; what was counted stays so."""
    cdef Py_ssize_t i
    if index.entries != NULL:
        for i in range(part.num_carried):
            if part.first_seen[i] == CARRIED:
                index.entries[part.ids[i]] = 0
    table_clear(&part.table)
    part.num_ids = part.num_carried = 0
