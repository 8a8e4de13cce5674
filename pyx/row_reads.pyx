"""Rows of tables read without a lock, while another thread or process updates them: see page_counters.h.

What the memory of another process holds is not trusted: rows and slots are checked before they are read.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memset
from posix.unistd cimport usleep

from ._types cimport grad_t, id_t
from .page_counters cimport (
    BEING_WRITTEN, MOST_WRITERS, NUM_WORDS, PAGES_BEGIN, begin_word, end_copy, end_step, load_word, page_version,
    store_word,
)
from .prefetch cimport prefetch
from .progress cimport yield_a_moment
from .row_keys cimport FIRST_ROW, KeySlot, KeySlots, RowKeys, find_key, key_home, key_mix
from .row_updates cimport Table, num_pages, row_of, set_layout

cdef extern from *:
    """
    #include <string.h>

    /* The one function of a reader that reads rows while they may be written: what it copied counts once the version of
       the page is the same before and after. */
    static __attribute__((noinline)) void copy_shared_row(float *into, const float *row, int64_t num_floats) {
        memcpy(into, row, (size_t)num_floats * sizeof(float));
    }
    """
    void copy_shared_row(float* into, const float* row, int64_t num_floats) noexcept nogil

cdef enum:
    BLOCK = 64          # rows that are located before the first of them is copied
    MOST_AHEAD = 16     # of which the memory is requested early
    MOST_TRIES = 2000   # to copy a row, about a millisecond: the caller then looks whether its writer is alive
    MOST_PAUSES = 20    # of 50 microseconds, until a step has ended
    MAX_TABLE_PARTS = 1024


# ---- a whole step


cdef class StepWords:
    """The words of all tables of an engine: whether a step runs, and which was the last one.

    memory : uint64 (NUM_WORDS,), of zeros or as another one left it; read-only for a reader
    """
    cdef readonly object memory
    cdef uint64_t* words        # sequence, step, durable step, state, newest time + 1

    def __init__(self, memory not None):
        cdef const uint64_t[::1] words = memory
        if words.shape[0] < NUM_WORDS:
            raise ValueError(f"expected {NUM_WORDS} words, got {words.shape[0]}")
        self.memory, self.words = memory, <uint64_t*>&words[0]

    cdef uint64_t* writable(self) except NULL:
        if not self.memory.flags.writeable:
            raise ValueError("the words are of another writer")
        return self.words

    def begin(self):
        """A step, or a load, begins to change rows."""
        begin_word(self.writable())

    def end(self, int64_t step):
        """It has ended. step : the number of steps since the tables began"""
        end_step(self.writable(), <uint64_t>step)

    @property
    def sequence(self):
        """Odd while a step runs, and another number after each."""
        return load_word(&self.words[0])

    def settled(self):
        """Return the sequence once no step runs; odd if one still runs after a millisecond or so."""
        cdef int pauses = 0
        cdef uint64_t sequence
        with nogil:
            sequence = load_word(&self.words[0])
            while sequence & 1 and pauses < MOST_PAUSES:
                usleep(50)
                pauses += 1
                sequence = load_word(&self.words[0])
        return sequence

    def is_still(self, uint64_t sequence):
        """Return whether no step ran since ``sequence``, which was even: what was read since then is of one step."""
        end_copy()
        return load_word(&self.words[0]) == sequence

    @property
    def step(self):
        return <int64_t>load_word(&self.words[1])

    @property
    def durable_step(self):
        """The last step that is on disk; 0: none is."""
        return <int64_t>load_word(&self.words[2])

    @durable_step.setter
    def durable_step(self, int64_t value):
        store_word(self.writable() + 2, <uint64_t>value)

    @property
    def frame_time(self):
        """The largest time of the frames in the rows, in seconds; None: unknown."""
        cdef uint64_t word = load_word(&self.words[4])
        return word - 1 if word else None

    @frame_time.setter
    def frame_time(self, value):
        cdef uint64_t word = 0 if value is None else <uint64_t>value + 1
        store_word(self.writable() + 4, word)

    @property
    def state(self):
        return load_word(&self.words[3])

    @state.setter
    def state(self, uint64_t value):
        store_word(self.writable() + 3, value)


# ---- rows


cdef struct TablePart:          # the rows of a table on one device
    const float* rows
    const uint64_t* counters    # of the batches of the first thread


cdef struct ReadTable:
    Table layout
    TablePart[MAX_TABLE_PARTS] parts
    int64_t num_parts, num_threads, per_thread
    const KeySlots* keys        # NULL: ids are rows


cdef struct LastBatches:        # complete ones of the threads of a part, as far as they were read
    int part
    uint64_t[MOST_WRITERS] batches


cdef class RowReads:
    """The weights of one table, for reads without a lock from any number of threads.

    layout : where the rows lie, a TableLayout
    parts : of each device, float32 (n,) with the rows, and uint64 (threads, n) with the counters of ``Step.count_pages``
    keys : of a dynamic table; None: ids are rows
    Raises ValueError for arrays that are too small.
    """
    cdef ReadTable table
    cdef tuple arrays
    cdef RowKeys keys

    def __init__(self, layout, parts, RowKeys keys):
        cdef int64_t dim = layout.dim, row_floats = layout.row_floats, num_rows = layout.num_rows
        cdef int64_t num_shards = layout.num_shards, rows_per_shard = layout.rows_per_shard
        cdef int64_t shards_per_part = layout.shards_per_part
        cdef int64_t first_float = layout.first_float, first_page = layout.first_page
        cdef const float[::1] floats
        cdef const uint64_t[:, ::1] counters
        cdef ReadTable* t = &self.table
        self.arrays, self.keys = tuple(parts), keys
        if not 1 <= len(self.arrays) <= MAX_TABLE_PARTS or not 1 <= dim <= row_floats or min(
            num_rows, num_shards, rows_per_shard, shards_per_part
        ) < 1 or min(first_float, first_page) < 0:
            raise ValueError("the layout of a table is out of range")
        # Python's integers do not overflow.
        if (num_shards > shards_per_part * len(self.arrays) or num_rows > int(rows_per_shard) * num_shards
                or int(rows_per_shard) * shards_per_part * row_floats + first_float >= 2**60):
            raise ValueError("the layout of a table is out of range")
        set_layout(&t.layout, num_rows, num_shards, layout.mod, rows_per_shard, shards_per_part)
        t.layout.dim, t.layout.row_floats, t.layout.first_page = dim, row_floats, first_page
        t.num_parts = len(self.arrays)
        for part, (floats, counters) in enumerate(self.arrays):
            if floats.shape[0] < first_float + t.layout.num_rows * row_floats:
                raise ValueError(f"expected {t.layout.num_rows} rows of {row_floats} floats, got {floats.shape[0]} floats")
            if not 1 <= counters.shape[0] <= MOST_WRITERS or counters.shape[1] < PAGES_BEGIN + first_page + num_pages(&t.layout):
                raise ValueError(f"expected counters of {num_pages(&t.layout)} pages, got {counters.shape[1]}")
            if part and (counters.shape[0] != t.num_threads or counters.shape[1] != t.per_thread):
                raise ValueError("the counters of the parts of a table differ in shape")
            t.num_threads, t.per_thread = counters.shape[0], counters.shape[1]
            t.parts[part].rows, t.parts[part].counters = &floats[first_float], &counters[0, 0]
        if keys is not None:
            if keys.keys.capacity != num_rows:
                raise ValueError(f"expected keys of {num_rows} rows, got {keys.keys.capacity}")
            t.keys = &keys.keys

    def read(self, const id_t[::1] ids not None, grad_t[:, ::1] out not None, uint8_t[::1] absent not None,
             int64_t first=0):
        """Copy the weights of ids to ``out``, from the first-th on; return how many are copied.

        out : OUT float32 (n, dim); absent : OUT, 1 for keys without a row, whose weights are left as they were
        Fewer than all: a page was being written for a millisecond; call again with ``first``.
        Raises ValueError for an id outside the table.
        """
        cdef int64_t n = ids.shape[0], done
        if out.shape[0] != n or absent.shape[0] != n or (n and out.shape[1] != self.table.layout.dim):
            raise ValueError(f"expected {n} rows of {self.table.layout.dim} floats, got {out.shape[0]} of {out.shape[1]}")
        if not n:
            return 0
        with nogil:
            done = read_rows(&self.table, &ids[0], &out[0, 0], &absent[0], first, n)
        if done < 0:
            raise ValueError(f"id {ids[-1 - done]} is no row of the table")
        return done


cdef int64_t read_rows(const ReadTable* t, const id_t* ids, float* out, uint8_t* absent, int64_t first,
                       int64_t n) noexcept nogil:
    """Returns how many rows are copied, or -1 - i where the i-th id is outside the table."""
    cdef int64_t rows[BLOCK]
    cdef int parts[BLOCK]
    cdef int64_t k, count, key_row, dim = t.layout.dim
    cdef bint copied
    cdef LastBatches complete
    complete.part = -1
    while first < n:
        count = min(<int64_t>BLOCK, n - first)
        if t.keys != NULL:
            for k in range(count):
                prefetch(&t.keys.slots[key_home(key_mix(<uint64_t>ids[first + k], t.keys.salt), 0, t.keys.num_slots)])
        for k in range(count):
            rows[k] = -1
            parts[k] = 0
            key_row = ids[first + k]
            if t.keys == NULL or find_key(t.keys, <uint64_t>ids[first + k], &key_row) != NULL:
                parts[k] = part_of(t, key_row, &rows[k])
            if k < MOST_AHEAD:
                prefetch_row(t, parts[k], rows[k])
        for k in range(count):
            if k + MOST_AHEAD < count:
                prefetch_row(t, parts[k + MOST_AHEAD], rows[k + MOST_AHEAD])
            if t.keys != NULL:  # a literal for each way: the compiler makes a function of each
                copied = copy_row(t, True, ids[first + k], 0, 0, out + (first + k) * dim, &absent[first + k], &complete)
            elif rows[k] < 0:
                return -1 - (first + k)
            else:
                copied = copy_row(t, False, 0, parts[k], rows[k], out + (first + k) * dim, NULL, &complete)
            if not copied:
                return first + k
        first += count
    return n


cdef inline int part_of(const ReadTable* t, id_t key, int64_t* row) noexcept nogil:
    """The part of an id, and its row there; below 0 where the id is outside the table."""
    cdef int64_t part
    for part in range(t.num_parts):
        row[0] = row_of(&t.layout, part * t.layout.shards_per_device, key)
        if row[0] != -1:
            return <int>part
    return 0


cdef inline uint64_t version_of(const ReadTable* t, int part, int64_t row, LastBatches* complete) noexcept nogil:
    """Of a row's page. The batches of each part are numbered for themselves."""
    if complete.part != part:
        complete.part = part
        memset(complete.batches, 0, t.num_threads * sizeof(uint64_t))
    return page_version(t.parts[part].counters, page_of(t, row), t.num_threads, t.per_thread, complete.batches)


cdef inline int64_t page_of(const ReadTable* t, int64_t row) noexcept nogil:
    return t.layout.first_page + (row >> t.layout.page_bits)


cdef inline void prefetch_row(const ReadTable* t, int part, int64_t row) noexcept nogil:
    cdef int64_t k
    if not 0 <= row < t.layout.num_rows:
        return
    for k in range(t.num_threads):
        prefetch(t.parts[part].counters + k * t.per_thread + PAGES_BEGIN + page_of(t, row))
    for k in range(0, t.layout.dim, 16):  # the floats of a cache line
        prefetch(t.parts[part].rows + row * t.layout.row_floats + k)


cdef inline bint copy_row(const ReadTable* t, bint by_key, id_t key, int part, int64_t row, float* out, uint8_t* absent,
                          LastBatches* complete) noexcept nogil:
    """Returns False if its page was being written all the time.

    by_key : the row of a key, which may pass to another key: it counts if the key has it between two equal versions
    """
    cdef const KeySlot* slot = NULL
    cdef uint64_t version, state = 0
    cdef int64_t key_row = 0
    cdef bint is_own = True, expired = False
    cdef int tries
    for tries in range(MOST_TRIES):
        if by_key:
            slot = find_key(t.keys, <uint64_t>key, &key_row)
            if slot == NULL:
                absent[0] = True
                return True
            state = <uint64_t>key_row + FIRST_ROW
            part = part_of(t, key_row, &row)
            if row < 0:
                return False  # damaged memory
        version = version_of(t, part, row, complete)
        if by_key:
            is_own = load_word(&slot.state) == state and load_word(&slot.key) == <uint64_t>key
            expired = t.keys.expire_after >= 0 and <int64_t>(
                load_word(t.keys.clock) - load_word(&t.keys.last[key_row])) > t.keys.expire_after
        if version != BEING_WRITTEN and is_own:
            copy_shared_row(out, t.parts[part].rows + row * t.layout.row_floats, t.layout.dim)
            end_copy()
            if version_of(t, part, row, complete) == version:
                if by_key:
                    absent[0] = expired
                return True
        yield_a_moment(tries)
    return False
