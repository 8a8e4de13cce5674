"""Adds a frame to the accumulators of its tables: one call begins it, any number of threads add it.

A task of a table with one part is a phase: to look up its ids, or to fold its rows. Of one with several parts it is to
split a stripe of its rows by part, or to add the rows of a part, once all stripes are split. Each thread begins the first
task that no thread has begun, without the interpreter in between, and takes part in the folds of others where there is
none left. A fold follows its look-up where that still runs. A thread that can do nothing at the moment, because the
system has taken another one off its processor, looks for other work. One that had no processor itself while it shared
a fold leaves the rest to the others. Where that happens again and again, one thread adds the next frames alone. This is
the only driver of the accumulators: the engine's pipeline, the public accumulators, the kernel tests and the sanitizers
all add frames through it.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING

from ._types cimport index_t
from .accumulator cimport Accumulator
from .coalesce cimport Frame, Part, Split, Vocabulary, is_split, part_find, part_find_split, split_stripe
from .gradient_blocks cimport blocks_of
from .progress cimport enters, is_set, leaves, set_flag, takes, yield_a_moment
from .row_sums cimport BAD, DISTURBED, LARGE, NOTHING, WORKED, part_check, part_fold, part_fold_split


cdef enum:
    MOST_ALONE = 15             # frames that one thread adds alone before others try again to share the work
    # Numbers that are added in less time than the interpreter's lock takes to come back from another thread.
    MOST_SMALL = 1 << 15


cdef enum Phase:
    CHECK
    FIND
    FOLD
    SPLIT
    ADD


PHASES = ("check", "find", "fold", "split", "add")


cdef struct Task:               # some of the work on a table's rows
    Phase phase
    int begun
    Part* parts
    Split* split
    const Vocabulary* vocabulary
    const Frame* frame
    Py_ssize_t number, num      # this one is the number-th of so many of its phase


cdef class Intake:
    """One frame at a time: ``begin``; ``check`` and ``work`` where nothing may be added before all was looked at; ``add``
    and ``work``; then ``end``, or ``undo`` where ``work`` returned False.
    """
    cdef list accumulators
    cdef bytearray memory       # of the tasks
    cdef Task* tasks
    cdef Py_ssize_t num_tasks
    cdef int bad, large
    cdef bint small
    cdef int num_threads        # threads that stay until nothing is left
    cdef int left               # whether a thread has left this frame, because it had no processor
    cdef int num_alone          # frames that one thread adds alone, from this one on
    cdef int next_alone         # the same, after the next frame that a thread leaves

    def __cinit__(self):
        self.accumulators, self.memory = [], bytearray()

    def begin(self, list accumulators not None, list blocks not None, index_t frame, parts=None):
        """Make room for a frame's rows in every accumulator, or in none.

        blocks : per accumulator, in arrival order, objects with
            ids : int64 (n,)
            grads : the accumulator's dtype, (m, dim), rows contiguous
            which : int64 (n,), the rows of grads that belong to the ids; None: all n of them
            gains : float32 (n,), the factor of each row, only where float32 is summed; None: no factor
        frame : its number; an id that occurs twice in frames of one number counts once
        parts : per accumulator, a power of two: into how many parts to split it from the next time on that it holds
            nothing; None: one
        Returns whether nothing was held before, so that the frame can be undone. Raises ValueError or MemoryError:
        nothing has changed then.
        """
        cdef Accumulator accumulator
        cdef Py_ssize_t i
        cdef bint vacant = True
        cdef Py_ssize_t num_numbers = 0
        self.accumulators = accumulators
        try:
            for i in range(len(accumulators)):
                accumulator = accumulators[i]
                vacant = vacant and accumulator.held() == 0
                arrays = [(block.ids, block.grads, block.which, block.gains) for block in blocks[i]]
                accumulator.begin(blocks_of(arrays, accumulator.dim, accumulator.frame.wide), frame,
                                  1 if parts is None else parts[i])
                num_numbers += accumulator.rows_begun * (1 + accumulator.dim)
        except BaseException:
            self.cancel()
            raise
        self.small = num_numbers <= MOST_SMALL
        return vacant

    def add(self, bint strict=True):
        """Create the tasks that add the rows. Returns how many there are.

        strict : a sum that is not finite makes its row bad; an id outside the vocabulary always does
        """
        cdef Py_ssize_t i, num_tables = len(self.accumulators)
        cdef Accumulator accumulator
        self._begin_tasks()
        self._count_alone()
        for accumulator in self.accumulators:
            accumulator.frame.strict = strict
            if accumulator.num_parts > 1:
                self._add_tasks(accumulator, SPLIT, accumulator.split.num_stripes)
        # The look-up of a table comes before the fold of the one before it, which then waits for less.
        for i in range(num_tables + 1):
            if i < num_tables:
                accumulator = self.accumulators[i]
                self._add_tasks(accumulator, FIND if accumulator.num_parts == 1 else ADD, accumulator.num_parts)
            if i > 0:
                accumulator = self.accumulators[i - 1]
                if accumulator.num_parts == 1 and accumulator.dim:  # else only ids are counted
                    self._add_tasks(accumulator, FOLD, 1)
        return self.num_tasks

    def check(self, Py_ssize_t num_parts):
        """Create the tasks that validate the rows and add nothing, so many per accumulator.

        Then ``may_overflow`` says whether a sum may leave the finite range.
        """
        self._begin_tasks()
        for accumulator in self.accumulators:
            self._add_tasks(accumulator, CHECK, num_parts)
        return self.num_tasks

    def work(self, bint alone=False):
        """Work on the tasks until none is left. Returns False where a row is bad.

        Any number of threads may call it at once; the frame is done when all calls have returned.
        alone : no other thread does; a small frame is then added with the interpreter's lock
        """
        if alone and self.small:
            self._work()
        else:
            with nogil:
                self._work()
        return not is_set(&self.bad)

    def work_on_next(self):
        """Do the first task that is left, as ``work`` does all: to measure each, on one thread.

        Returns its phase, one of PHASES, and the number of its accumulator; None: no task is left.
        """
        cdef Py_ssize_t i, number
        cdef int outcome
        for i in range(self.num_tasks):
            if is_set(&self.bad) or self._is_over(&self.tasks[i]):
                continue
            with nogil:
                outcome = self._do(&self.tasks[i], True)
            if outcome == BAD:
                set_flag(&self.bad)
            for number in range(len(self.accumulators)):
                if self.tasks[i].frame == &(<Accumulator>self.accumulators[number]).frame:
                    break
            return PHASES[self.tasks[i].phase], number
        return None

    @property
    def may_overflow(self):
        """Whether values were so large, when ``check`` had them looked at, that a sum may leave the finite range."""
        return bool(self.large)

    def end(self):
        """Count the frame as added."""
        for accumulator in self.accumulators:
            (<Accumulator>accumulator).end()
        self._forget()

    cpdef cancel(self):
        """Release the frame that was begun; nothing of it was added."""
        for accumulator in self.accumulators:
            (<Accumulator>accumulator).cancel()
        self._forget()

    def undo(self):
        """Take the frame back, however much of it was added. Only where nothing was held before it."""
        for accumulator in self.accumulators:
            (<Accumulator>accumulator).undo()
        self._forget()

    cdef void _work(self) noexcept nogil:
        cdef Py_ssize_t i, first = 0
        cdef int outcome, moment = 0
        enters(&self.num_threads)
        if self.num_alone and leaves(&self.num_threads):
            return
        while not is_set(&self.bad):
            while first < self.num_tasks and self._is_over(&self.tasks[first]):
                first += 1
            if first == self.num_tasks:
                break
            outcome, i = NOTHING, first
            while outcome == NOTHING and i < self.num_tasks:
                if self.tasks[i].phase == ADD and not is_split(self.tasks[i].split):
                    i += self.tasks[i].num - self.tasks[i].number  # none of its parts can be added yet
                else:
                    outcome = self._do(&self.tasks[i], False)
                    i += 1
            # Begun by others: the last ones first, which have most left.
            while outcome == NOTHING and i > first:
                i -= 1
                if self.tasks[i].phase == FOLD:
                    outcome = self._do(&self.tasks[i], True)
                elif self.tasks[i].phase == ADD:
                    i -= self.tasks[i].number  # no thread joins another one
            if outcome == BAD:
                set_flag(&self.bad)
            elif outcome == DISTURBED and leaves(&self.num_threads):
                set_flag(&self.left)
                break
            moment = moment + 1 if outcome == NOTHING else 0
            if moment:
                yield_a_moment(moment)

    cdef bint _is_over(self, const Task* t) noexcept nogil:
        """Whether a thread that has not begun the task has nothing to do there."""
        return is_set(&t.parts.all_taken) if t.phase == FOLD else is_set(&t.begun)

    cdef int _do(self, Task* t, bint joins) noexcept nogil:
        """As much of a task as can be done at present. joins : whether also of a fold that another thread does"""
        cdef int outcome
        cdef Py_ssize_t number
        if self._is_over(t) or not (takes(&t.begun) or joins):
            return NOTHING
        if t.phase == FOLD:
            return part_fold(t.parts, t.frame, &self.bad)
        if t.phase == FIND:
            return BAD if part_find(t.parts, t.vocabulary, t.frame, &self.bad) else WORKED
        if t.phase == SPLIT:
            return BAD if split_stripe(t.split, t.vocabulary, t.frame, t.number) else WORKED
        if t.phase == ADD:
            number = t.split.order[t.number]
            part_find_split(&t.parts[number], t.vocabulary, t.split, number, t.frame.number, &self.bad)
            return part_fold_split(&t.parts[number], t.frame, t.split, number, &self.bad) if t.frame.dim else WORKED
        outcome = part_check(t.frame, t.vocabulary, t.number, t.num)
        if outcome == LARGE:
            set_flag(&self.large)
        return outcome

    cdef void _count_alone(self) noexcept:
        """Decide whether one thread adds the frame alone.

        A program that keeps a processor busy does so for many frames, as a rule, and each of them loses milliseconds until
        it is noticed.
        """
        if self.num_alone:
            self.num_alone -= 1
        elif self.left:
            self.num_alone = self.next_alone
            self.next_alone = min(2 * self.next_alone + 1, MOST_ALONE)
        else:
            self.next_alone //= 2
        self.left = 0

    cdef int _begin_tasks(self) except -1:
        self.num_tasks, self.bad, self.large, self.num_threads = 0, 0, 0, 0
        return 0

    cdef int _add_tasks(self, Accumulator accumulator, Phase phase, Py_ssize_t num) except -1:
        cdef Task* task
        cdef Py_ssize_t number
        if (self.num_tasks + num) * <Py_ssize_t>sizeof(Task) > len(self.memory):
            self.memory += bytes(len(self.memory) + num * sizeof(Task))
            self.tasks = <Task*>PyByteArray_AS_STRING(self.memory)
        for number in range(num):
            task = &self.tasks[self.num_tasks]
            task.phase, task.begun, task.parts, task.split = phase, 0, accumulator.parts, &accumulator.split
            task.vocabulary, task.frame = &accumulator.vocabulary, &accumulator.frame
            task.number, task.num = number, num
            self.num_tasks += 1
        return 0

    cdef int _forget(self) except -1:
        self.accumulators, self.num_tasks = [], 0
        return 0


def bytes_held(list accumulators not None):
    """Bytes held for sums, ids, counts and indices, and for those to come."""
    cdef Py_ssize_t n = 0
    for accumulator in accumulators:
        n += (<Accumulator?>accumulator).num_bytes()
    return n
