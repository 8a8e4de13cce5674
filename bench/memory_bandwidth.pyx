"""The memory traffic that no step can avoid: read a stream, write a stream, read and write random rows.

roofline.py measures these loops for every case. They contain no code of penstock. The caller owns the memory. All loops
run without the GIL, so that Python threads process parts of an array in parallel.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

cdef extern from *:
    """
    #define BENCH_PREFETCH(address) __builtin_prefetch(address, 1)
    """
    void prefetch "BENCH_PREFETCH" (const void* address) noexcept nogil

cdef enum:
    LINES_AHEAD = 16  # of touch_lines
    AHEAD = 24        # rows, of update_rows; 16 to 32 are equally fast
    LINE_FLOATS = 16  # of a cache line of 64 bytes


def read_stream(const uint64_t[::1] words not None):
    """Return the sum of all words modulo 2^64. Integers, so that the compiler may vectorize the sum."""
    cdef uint64_t total = 0
    cdef Py_ssize_t i
    with nogil:
        for i in range(words.shape[0]):
            total += words[i]
    return total


def write_stream(uint64_t[::1] words not None, int byte):
    """Set every byte. libc writes large blocks past the caches, as suits a result that is written and not read."""
    with nogil:
        if words.shape[0]:
            memset(&words[0], byte, words.shape[0] * sizeof(uint64_t))


def update_rows(float[::1] table not None, const int64_t[::1] rows not None, Py_ssize_t width):
    """Add 1 to table[row*width : (row+1)*width] for every row, in order, with prefetch.

    Raises IndexError for a row outside the table.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    cdef Py_ssize_t i, j, n = rows.shape[0], num_rows = table.shape[0] // width
    cdef float* row
    cdef bint inside = True
    with nogil:
        for i in range(n):
            inside = inside and 0 <= rows[i] < num_rows
        if inside:
            for i in range(n):
                if i + AHEAD < n:
                    row = &table[rows[i + AHEAD] * width]
                    for j in range((width + LINE_FLOATS - 1) // LINE_FLOATS):
                        prefetch(row + j * LINE_FLOATS)
                row = &table[rows[i] * width]
                for j in range(width):
                    row[j] += 1
    if not inside:
        raise IndexError(f"a row lies outside the table of {num_rows} rows")


def touch_lines(uint64_t[::1] words not None, const int64_t[::1] lines not None):
    """Add 1 to the first word of every line of 64 bytes, in order, with prefetch: the minimum for a hash table.

    Raises IndexError for a line outside the array.
    """
    cdef Py_ssize_t i, n = lines.shape[0], num_lines = words.shape[0] // 8
    cdef bint inside = True
    with nogil:
        for i in range(n):
            inside = inside and 0 <= lines[i] < num_lines
        if inside:
            for i in range(n):
                if i + LINES_AHEAD < n:
                    prefetch(&words[lines[i + LINES_AHEAD] * 8])
                words[lines[i] * 8] += 1
    if not inside:
        raise IndexError(f"a line lies outside the array of {num_lines} lines")
