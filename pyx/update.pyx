"""The optimizer's step on tables in the host's memory: which rows of which tables, and the arrays of their gradients.

A ``Step`` is prepared, then run on any number of threads. Nothing is staged, padded or copied.
"""

import numpy as np

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset
from posix.unistd cimport usleep

from ._types cimport grad_t, id_t
from .accumulator cimport isa_of
from .buffer_pool cimport Sums
from .page_counters cimport NUM_WORDS, PAGES_BEGIN, begin_word, end_step
from .row_updates cimport (
    CHUNK, MOST_AHEAD, MOST_CHUNKS, READ, UPDATE, WRITE, NotFinite, Op, Rule, Segment, StepContext, StepWork,
    Sweep, Table, UpdateRows, chunks, do_items, num_pages, part_begin, set_layout,
)


cdef extern from "update_rules.h" nogil:
    enum: NUM_RULES
    ctypedef struct RuleEntry:
        const char* name
        int num_slots, row_slots
        UpdateRows run
    const RuleEntry* rules_of_isa(int isa)


def rules():
    """Name → number of slots of every rule in update_rules.h."""
    cdef const RuleEntry* entries = rules_of_isa(isa_of(""))
    cdef int i
    return {entries[i].name.decode(): entries[i].num_slots for i in range(NUM_RULES)}


cdef object FLOAT32 = np.dtype(np.float32)

# Bytes of rows asked for ahead: half of a first-level cache.
cdef int64_t BYTES_AHEAD = 16384


cdef class TableRule:
    """Hold the constants of a table: its rule, and where its rows lie.

    rule : one of ``rules``
    numbers : the rule's parameters, switches and limits, by the field names of Rule; one that is missing is 0
    rows_per_shard, num_shards, shards_per_device, mod : as in partition.destinations; by default one shard has all rows
    target : one of ``accumulator.targets``; "": the best
    first_float : where the table begins in the array of floats that every device has
    name : in errors
    """
    def __init__(self, str rule, numbers, *, int64_t dim, int64_t vocabulary_size, int64_t rows_per_shard,
                 int64_t num_shards=1, int64_t shards_per_device=1, bint mod=False, bint non_lazy=False, str target="",
                 int64_t first_float=0, str name=""):
        cdef Table* t = &self.table
        cdef const RuleEntry* entry = entry_of(rule, target)
        cdef grad_t[::1] zeros
        self.name = name[:80].encode("utf-8", "replace")  # an error has not room for more
        t.run, t.num_parts, t.dim, t.non_lazy, t.name = entry.run, 1 + entry.num_slots, dim, non_lazy, self.name
        t.num_wide = t.num_parts - entry.row_slots
        self.zeros = np.zeros(max(1, dim), np.float32)
        zeros = self.zeros
        t.zeros = &zeros[0]
        set_layout(t, vocabulary_size, num_shards, mod, rows_per_shard, shards_per_device)
        t.first_float = first_float
        t.row_floats = part_begin(t, t.num_parts)
        t.ahead = max(4, min(<int64_t>MOST_AHEAD, BYTES_AHEAD // (t.row_floats * <int64_t>sizeof(float) + 1)))
        t.rule = {**dict.fromkeys(NUMBERS, 0), **numbers}

    @property
    def end(self):
        """Where the table ends in that array."""
        return self.table.first_float + self.table.num_rows * self.table.row_floats

    @property
    def first_float(self):
        """Where the table begins in that array."""
        return self.table.first_float

    @property
    def row_floats(self):
        """Floats of a row: the weights first, then the slots."""
        return self.table.row_floats

    @property
    def first_page(self):
        """Where the table's pages begin in the counters of a thread."""
        return self.table.first_page


# The fields of Rule: a struct becomes a dict, and a dict a struct.
cdef Rule NO_RULE
cdef object RULE_FIELDS = NO_RULE
NUMBERS = list(RULE_FIELDS)


cdef const RuleEntry* entry_of(str rule, str target) except NULL:
    cdef const RuleEntry* entries = rules_of_isa(isa_of(target))
    cdef int i
    for i in range(NUM_RULES):
        if entries[i].name.decode() == rule:
            return &entries[i]
    raise ValueError(f"no rule '{rule}'")


# Counters of a cache line: two threads share none.
cdef int64_t LINE_COUNTERS = 8
# A step of fewer rows is done on the calling thread; with more, each thread has at least a chunk.
cdef int64_t ROWS_WORTH_SHARING = 4 * CHUNK


cdef class Step:
    """One thing to do to the rows of tables that lie in the same arrays. Prepared, then run; one caller at a time.

    rules : of the tables, which are called by their numbers here
    floats : float32 (n,) of each device, in which its part of the tables lies
    """
    def __cinit__(self, rules, floats):
        cdef float[::1] memory
        self.rules, self.floats, self.num_devices = tuple(rules), tuple(floats), len(floats)
        self.work.segments, self.work.sweeps = NULL, NULL
        self.context.work = &self.work
        self.memory = <float**>PyMem_Calloc(len(self.floats), sizeof(float*))
        self.counters = <uint64_t**>PyMem_Calloc(len(self.floats), sizeof(uint64_t*))
        self.context.known = <uint64_t**>PyMem_Calloc(len(self.floats), sizeof(uint64_t*))
        if self.memory == NULL or self.counters == NULL or self.context.known == NULL:
            raise MemoryError("no memory for a step")
        self.context.num_floats = end = max((<TableRule?>rule).end for rule in self.rules)
        for device, memory in enumerate(self.floats):
            if memory.shape[0] < end:
                raise ValueError(f"expected {end} floats for the tables of a device, got {memory.shape[0]}")
            self.memory[device] = &memory[0]

    def __dealloc__(self):
        cdef Py_ssize_t device
        if self.context.known != NULL:
            for device in range(self.num_devices):
                free(self.context.known[device])
        PyMem_Free(self.context.known)
        PyMem_Free(self.memory)
        PyMem_Free(self.counters)
        PyMem_Free(self.work.segments)
        PyMem_Free(self.work.sweeps)

    @property
    def counters_per_thread(self):
        """Counters that each thread needs for the pages of all tables of a device."""
        cdef int64_t n = PAGES_BEGIN
        for rule in self.rules:
            (<TableRule>rule).table.first_page = n - PAGES_BEGIN
            n += num_pages(&(<TableRule>rule).table)
        return (n + LINE_COUNTERS - 1) // LINE_COUNTERS * LINE_COUNTERS

    def count_pages(self, counters):
        """From now on, count the writes of every page of rows, for readers without a lock (row_reads.pyx).

        counters : of each device, zeros, uint64 (threads + 1, counters_per_thread): that many threads may run the step
        """
        cdef uint64_t[:, ::1] of_device
        per_thread, self.counted = self.counters_per_thread, tuple(counters)
        if len(self.counted) != len(self.floats):
            raise ValueError(f"expected counters of {len(self.floats)} devices, got {len(self.counted)}")
        for device, of_device in enumerate(self.counted):
            if of_device.shape[1] != per_thread or of_device.shape[0] < 2:
                raise ValueError(f"expected {per_thread} counters of each thread, got {of_device.shape[1]}")
            self.counters[device] = &of_device[0, 0]
            self.num_counting = of_device.shape[0]
        self.context.counters_per_thread = per_thread

    def note_steps(self, words not None):
        """From now on, let ``update_small`` begin and end its steps in these words. words : the memory of StepWords"""
        cdef uint64_t[::1] noted = words
        if noted.shape[0] < NUM_WORDS:
            raise ValueError(f"expected {NUM_WORDS} words, got {noted.shape[0]}")
        self.noted, self.words = words, &noted[0]

    def take_not_finite(self):
        """Return how many rows updates have made infinite or NaN since the last call, and the first one; None: none.

        A row counts once, until it is written. The first: (number of its table, device, row there).
        """
        cdef NotFinite* total = &self.context.not_finite
        cdef Py_ssize_t number
        if not total.num_rows:
            return None
        num_rows, total.num_rows = total.num_rows, 0
        for number in range(len(self.rules)):
            if &(<TableRule>self.rules[number]).table == total.table:
                break
        return num_rows, (number, total.device, total.row)

    def run(self, run_tasks, int64_t threads):
        """Do what was prepared, on one device after the other, and release its arrays.

        run_tasks : ``ThreadTeam.run``; threads : at most so many
        Raises MemoryError before any row has changed; ValueError for an id outside its table, after all other rows; an
        interrupt after all rows.
        """
        cdef StepContext* context = &self.context
        cdef uint64_t* touched = NULL
        context.bad_id_table = NULL
        if self.counted is not None:
            threads = min(threads, self.num_counting - 1)
        if self.work.num_words:
            touched = <uint64_t*>PyMem_Calloc(self.work.num_words, sizeof(uint64_t))
            if touched == NULL:
                raise MemoryError("no memory for a bit per row of a table")
        context.touched, self.interrupt = touched, None
        for context.device in range(len(self.floats)):
            context.floats, context.counters = self.memory[context.device], self.counters[context.device]
            self._do_all(run_tasks, threads, False, self.work.num_items, self.num_rows)
            if touched != NULL:
                self._do_all(run_tasks, threads, True, self.work.num_sweep_items, self.num_swept_rows)
                memset(touched, 0, self.work.num_words * sizeof(uint64_t))
        PyMem_Free(touched)
        self._release()
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt
        if context.bad_id_table != NULL:
            name = context.bad_id_table.name.decode("utf-8", "replace")
            raise ValueError(f"an id outside the table '{name}'; all other rows were handled")

    def help(self):
        """Do items of the running step until none is left. Returns True, as a task of ``ThreadTeam.run``.

        A thread that comes between two runs does nothing; ``is_open`` and ``num_helping`` change under the GIL.
        """
        if self.is_open:
            self.num_helping += 1
            with nogil:
                do_items(&self.context)
            self.num_helping -= 1
        return True

    def help_with_next(self):
        """Do one item of the running step, as ``help`` does all: to measure each. Returns whether there was one."""
        cdef StepContext* context = &self.context
        cdef int64_t num_items = context.num_items
        if not self.is_open or context.next_item >= num_items:
            return False
        context.num_items = context.next_item + 1
        with nogil:
            do_items(context)
        context.num_items, context.next_item, context.next_thread = num_items, context.num_items, 0
        return True

    cdef int _do_all(self, run_tasks, int64_t threads, bint is_sweep, int64_t num_items, int64_t num_rows) except -1:
        """Do all items, whatever the team does: no row is missed, and no helper is at work afterwards."""
        self.context.is_sweep, self.context.num_items = is_sweep, num_items
        self.context.next_item = self.context.next_thread = 0
        self.is_open = True
        if threads > 1 and num_rows >= ROWS_WORTH_SHARING:
            try:
                run_tasks([self.help] * min(threads, num_rows // CHUNK))
            except MemoryError:
                pass  # for the lists of the team: this thread does the rest
            except BaseException as error:
                self.interrupt = error
        with nogil:
            do_items(&self.context)
        self.is_open = False
        while self.num_helping:
            with nogil:
                usleep(20)
        return 0

    cdef int begin_small(self, Py_ssize_t number) except -1:
        """Prepare for ``update_small`` of a table, until ``_release``. Raises MemoryError."""
        self._begin(UPDATE)
        self._next(&(<TableRule?>self.rules[number]).table, 1, 0, -1)
        self.context.is_sweep, self.context.touched = False, NULL
        return 0

    cdef void update_small(self, const id_t* ids, const grad_t* grads, int64_t num_rows, float lr,
                           uint64_t step) noexcept nogil:
        """One optimizer application to rows of the table of ``begin_small``, on the calling thread, without Python.

        ids : rows of the table, distinct; grads : one row after the other; step : the number of steps afterwards
        """
        cdef Segment* segment = self.work.segments
        cdef StepContext* context = &self.context
        segment.ids, segment.values, segment.row_floats = ids, <grad_t*>grads, segment.table.dim
        segment.num_rows, segment.rows_per_item, segment.lr = num_rows, num_rows, lr
        context.num_items = 1
        if self.words != NULL:
            begin_word(self.words)
        for context.device in range(self.num_devices):
            context.floats, context.counters = self.memory[context.device], self.counters[context.device]
            context.next_item = context.next_thread = 0
            do_items(context)
        if self.words != NULL:
            end_step(self.words, step)

    def update(self, updates):
        """One optimizer application to the rows of some tables, each table once.

        updates : (table, segments, rate) each; segments : (ids int64 (n,), gradients float32 (n, dim)) or
            accumulator's Sums each, ids distinct over all segments of a table; rate : the learning rate, or
            (learning rate, of_mean, of_root)
        """
        cdef TableRule rule
        cdef Py_ssize_t number
        cdef int64_t sweep
        cdef float lr
        self._begin(UPDATE)
        for number, segments, rate in updates:
            rule = self.rules[number]
            if isinstance(rate, tuple):
                rate, rule.table.rule.of_mean, rule.table.rule.of_root = rate
            lr = rate
            sweep = self._sweep(&rule.table, lr) if rule.table.non_lazy else -1
            for segment in segments:
                if isinstance(segment, Sums) and (<Sums>segment).dim == rule.table.dim and (<Sums>segment).dtype is FLOAT32:
                    self._add_sums(&rule.table, <Sums>segment, lr, sweep)
                else:
                    ids, grads = segment
                    self._add(&rule.table, ids, grads, rule.table.dim, lr, sweep)
        self.arrays = updates

    def copy(self, Py_ssize_t number, ids, values, part, bint write):
        """Set one part of the rows of distinct ids to values, or values to that part of the rows of any ids.

        ids : int64 (n,), or the first of consecutive ids
        values : float32 (n, floats of the part); written where write is False
        part : None: all, side by side
        """
        cdef const Table* table = &(<TableRule?>self.rules[number]).table
        cdef int64_t begin = part or 0, end = table.num_parts if part is None else begin + 1
        if not 0 <= begin < end <= table.num_parts:
            raise ValueError(f"expected 0 <= part < {table.num_parts}, got {part}")
        self._begin(WRITE if write else READ)
        self.work.first_copied = part_begin(table, begin)
        self.work.num_copied = part_begin(table, end) - self.work.first_copied
        self._add(table, ids, values, self.work.num_copied, 0, -1)
        self.arrays = ids, values

    cdef int _release(self) except -1:
        self.arrays = None
        self.num_rows = self.num_swept_rows = 0
        self.work.num_segments = self.work.num_items = 0
        self.work.num_sweeps = self.work.num_sweep_items = self.work.num_words = 0
        return 0

    cdef int _begin(self, Op op) except -1:
        self._release()
        self.work.op = op
        return 0

    cdef int _add(self, const Table* table, ids, values, int64_t row_floats, float lr, int64_t sweep) except -1:
        """row_floats : of the values"""
        cdef Segment* segment
        cdef const id_t[::1] keys
        cdef const grad_t[:, ::1] rows = values  # one row after the other
        cdef grad_t[:, ::1] written
        cdef Py_ssize_t num_rows = rows.shape[0]
        if self.work.op == READ:
            written = values  # refuses a read-only array
        if rows.shape[1] != row_floats:
            raise ValueError(f"expected rows of {row_floats} floats, got {rows.shape[1]}")
        if not isinstance(ids, int):
            keys = ids
            if keys.shape[0] != num_rows:
                raise ValueError(f"expected {keys.shape[0]} rows for as many ids, got {num_rows}")
        if num_rows:
            segment = self._next(table, num_rows, lr, sweep)
            segment.values, segment.row_floats = <grad_t*>&rows[0, 0], row_floats
            if isinstance(ids, int):
                segment.first = ids
            else:
                segment.ids = &keys[0]
        return 0

    cdef int _add_sums(self, const Table* table, Sums sums, float lr, int64_t sweep) except -1:
        """As they were handed over, without arrays."""
        cdef Segment* segment
        if sums.num_ids:
            segment = self._next(table, sums.num_ids, lr, sweep)
            segment.ids = <const id_t*>sums.id_block.memory + sums.first
            segment.values = <grad_t*>sums.sum_block.memory + sums.first * table.dim
            segment.row_floats = table.dim
        return 0

    cdef Segment* _next(self, const Table* table, int64_t num_rows, float lr, int64_t sweep) except NULL:
        cdef Segment* segment
        cdef StepWork* o = &self.work
        if o.num_segments == self.room:
            o.segments = <Segment*>more_room(o.segments, &self.room, sizeof(Segment))
        segment = &o.segments[o.num_segments]
        segment.table, segment.lr, segment.sweep = table, lr, sweep
        segment.ids, segment.first, segment.values, segment.row_floats = NULL, 0, NULL, 0
        segment.num_rows, segment.first_item = num_rows, o.num_items
        segment.rows_per_item = CHUNK if num_rows < 4 * MOST_CHUNKS * CHUNK else MOST_CHUNKS * CHUNK
        o.num_items += (num_rows + segment.rows_per_item - 1) // segment.rows_per_item
        o.num_segments += 1
        self.num_rows += num_rows
        return segment

    cdef int64_t _sweep(self, const Table* table, float lr) except -1:
        cdef Sweep* sweep
        cdef StepWork* o = &self.work
        if o.num_sweeps == self.room_for_sweeps:
            o.sweeps = <Sweep*>more_room(o.sweeps, &self.room_for_sweeps, sizeof(Sweep))
        sweep = &o.sweeps[o.num_sweeps]
        sweep.table, sweep.lr, sweep.first_word, sweep.first_item = table, lr, o.num_words, o.num_sweep_items
        o.num_words += (table.num_rows + 63) // 64
        o.num_sweep_items += chunks(table.num_rows)
        self.num_swept_rows += table.num_rows
        o.num_sweeps += 1
        return o.num_sweeps - 1


cdef void* more_room(void* entries, Py_ssize_t* room, size_t size) except NULL:
    """Twice the room for entries of that size; where there is no memory for it, what was there stays."""
    cdef Py_ssize_t capacity = max(4, 2 * room[0])
    cdef void* grown = PyMem_Realloc(entries, capacity * size)
    if grown == NULL:
        raise MemoryError(f"no memory for a step of {capacity} segments")
    room[0] = capacity
    return grown
