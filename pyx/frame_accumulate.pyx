"""Adds a frame to the accumulators of its tables: one call begins it, any number of threads add it.

A task is one phase of one part of a table: to look up its ids, to fold its rows, or to help with that. Each thread takes
the next free task with an atomic counter, without the interpreter in between. A fold follows its look-up, and help its
fold, while that still runs; nothing waits for a task that no thread has taken, because those come first. This is the only
driver of the accumulators: the engine's pipeline, the public accumulators, the kernel tests and the sanitizers all add
frames through it.
"""

from cpython.mem cimport PyMem_Free, PyMem_Realloc

from ._types cimport index_t
from .accumulator cimport Accumulator
from .coalesce cimport Frame, Part, Vocabulary, part_find
from .gradient_blocks cimport blocks_of
from .row_sums cimport part_check, part_fold, part_help


cdef extern from *:
    """
    #define next_task(next) __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)
    """
    Py_ssize_t next_task(Py_ssize_t* next) nogil

cdef extern from "progress.h" nogil:
    bint is_set(const int* flag)
    void set_flag(int* flag)


cdef enum Phase:
    CHECK
    FIND
    FOLD
    HELP


cdef struct Task:               # one phase of one part of a table's rows
    Phase phase
    Part* part
    const Vocabulary* vocabulary
    const Frame* frame
    Py_ssize_t number, num_parts


cdef class Intake:
    """One frame at a time: ``begin``; ``check`` and ``work`` where nothing may be added before all was looked at; ``add``
    and ``work``; then ``end``, or ``undo`` where ``work`` returned False.
    """
    cdef list accumulators
    cdef Task* tasks
    cdef Py_ssize_t num_tasks, room, next
    cdef int bad

    def __cinit__(self):
        self.accumulators = []

    def __dealloc__(self):
        PyMem_Free(self.tasks)

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
        self.accumulators = accumulators
        try:
            for i in range(len(accumulators)):
                accumulator = accumulators[i]
                vacant = vacant and accumulator.held() == 0
                arrays = [(block.ids, block.grads, block.which, block.gains) for block in blocks[i]]
                accumulator.begin(blocks_of(arrays, accumulator.dim, accumulator.wide), frame,
                                  1 if parts is None else parts[i])
        except BaseException:
            self.cancel()
            raise
        return vacant

    def add(self, bint strict=True):
        """Create the tasks that add the rows. Returns how many there are.

        strict : a value that is not finite makes its row bad; an id outside the vocabulary always does
        """
        cdef Py_ssize_t i, num_tables = len(self.accumulators)
        self._begin_tasks()
        # The look-ups of a table come before the folds of the one before it, which then wait for less; help comes last.
        for i in range(num_tables + 1):
            if i < num_tables:
                (<Accumulator>self.accumulators[i]).frame.strict = strict
                self._add_tasks(self.accumulators[i], FIND)
            if i > 0:
                self._add_tasks(self.accumulators[i - 1], FOLD)
        for i in range(num_tables):
            self._add_tasks(self.accumulators[num_tables - 1 - i], HELP)
        return self.num_tasks

    def check(self, Py_ssize_t num_parts):
        """Create the tasks that validate the rows and add nothing, so many per accumulator."""
        self._begin_tasks()
        for accumulator in self.accumulators:
            self._add_tasks(accumulator, CHECK, num_parts)
        return self.num_tasks

    def work(self):
        """Work on the tasks until none is left. Returns False where a row is bad.

        Any number of threads may call it at once; the frame is done when all calls have returned.
        """
        cdef Py_ssize_t i
        cdef bint bad
        with nogil:
            i = next_task(&self.next)
            while i < self.num_tasks and not is_set(&self.bad):
                if self._does(&self.tasks[i]):
                    set_flag(&self.bad)
                i = next_task(&self.next)
            bad = is_set(&self.bad)
        return not bad

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

    cdef bint _does(self, const Task* t) noexcept nogil:
        """Whether a row is bad."""
        if t.phase == FIND:
            return part_find(t.part, t.vocabulary, t.frame, t.number, t.num_parts, &self.bad)
        if t.phase == FOLD:
            return part_fold(t.part, t.frame, &self.bad)
        if t.phase == HELP:
            return part_help(t.part, t.frame, &self.bad)
        return part_check(t.frame, t.vocabulary, t.number, t.num_parts)

    cdef int _begin_tasks(self) except -1:
        self.num_tasks, self.next, self.bad = 0, 0, 0
        return 0

    cdef int _add_tasks(self, Accumulator accumulator, Phase phase, Py_ssize_t num_checks=0) except -1:
        cdef Task* task
        cdef Py_ssize_t number, num_parts = num_checks or accumulator.num_parts
        if (phase == FOLD or phase == HELP) and not accumulator.dim:
            return 0  # only ids are counted
        self._reserve(self.num_tasks + num_parts)
        for number in range(num_parts):
            task = &self.tasks[self.num_tasks]
            task.phase, task.part = phase, NULL if phase == CHECK else &accumulator.parts[number]
            task.vocabulary, task.frame = &accumulator.vocabulary, &accumulator.frame
            task.number, task.num_parts = number, num_parts
            self.num_tasks += 1
        return 0

    cdef int _reserve(self, Py_ssize_t num_tasks) except -1:
        cdef Py_ssize_t capacity = max(num_tasks, 2 * self.room)
        cdef Task* grown
        if num_tasks > self.room:
            grown = <Task*>PyMem_Realloc(self.tasks, capacity * sizeof(Task))
            if grown == NULL:
                raise MemoryError(f"no memory for {capacity} tasks")
            self.tasks, self.room = grown, capacity
        return 0

    cdef int _forget(self) except -1:
        self.accumulators, self.num_tasks = [], 0
        return 0


def bytes_held(list accumulators not None):
    """``nbytes`` of all of them."""
    cdef Py_ssize_t n = 0
    for accumulator in accumulators:
        n += (<Accumulator?>accumulator).num_bytes()
    return n
