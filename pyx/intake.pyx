"""A frame on its way into the accumulators of several tables: one call begins it, any number of threads add it.

What is done for a table, and for a part of one that is split, is a task; whoever works takes the next one that
nobody has taken, without the interpreter in between.
"""

from cpython.mem cimport PyMem_Free, PyMem_Realloc

from ._types cimport index_t
from .accumulator cimport Accumulator
from .parts cimport Index, Part, Source, part_add, part_check


cdef extern from *:
    """
    #define taken(next) __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)
    #define is_set(flag) __atomic_load_n(flag, __ATOMIC_RELAXED)
    #define set_flag(flag) __atomic_store_n(flag, 1, __ATOMIC_RELAXED)
    """
    Py_ssize_t taken(Py_ssize_t* next) nogil
    int is_set(int* flag) nogil
    void set_flag(int* flag) nogil


cdef struct Task:               # one part of a table's rows
    Part* part
    const Index* index
    const Source* sources
    Py_ssize_t num_sources, dim, number, num_parts
    bint wide


cdef class Intake:
    """One frame at a time: ``begin``; ``check`` and ``work`` where nothing may be added before all was looked at; ``add``
    and ``work``; then ``end``, or ``undo`` where ``work`` said no.
    """
    cdef list accumulators
    cdef Task* tasks
    cdef Py_ssize_t num_tasks, room, next
    cdef index_t frame
    cdef bint adding
    cdef int bad

    def __cinit__(self):
        self.accumulators = []

    def __dealloc__(self):
        PyMem_Free(self.tasks)

    def begin(self, list accumulators not None, list blocks not None, index_t frame, parts=None):
        """Make room for a frame's rows: of each accumulator what ``Accumulator.begin`` takes. All of them or none.

        blocks : objects with ids, grads, which and gains, by accumulator; parts : how many by accumulator; None: one
        Returns whether nothing was held before, so that the frame can be undone.
        """
        cdef Accumulator accumulator
        cdef Py_ssize_t at
        cdef bint vacant = True
        self.accumulators, self.frame = accumulators, frame
        try:
            for at in range(len(accumulators)):
                accumulator = accumulators[at]
                vacant = vacant and accumulator.held() == 0
                accumulator.begin([(block.ids, block.grads, block.which, block.gains) for block in blocks[at]], frame,
                                  1 if parts is None else parts[at])
        except BaseException:
            self.cancel()
            raise
        return vacant

    def add(self):
        """Share out what adds the rows. Returns how many tasks there are."""
        return self._share_out(0)

    def check(self, Py_ssize_t num_parts):
        """Share out what looks through the rows and adds nothing, in so many parts each."""
        return self._share_out(num_parts)

    def work(self):
        """Do what has been shared out until nothing is left. Returns False where a row is bad.

        By any number of threads; all is done when all have returned.
        """
        cdef Py_ssize_t at
        cdef bint bad
        with nogil:
            at = taken(&self.next)
            while at < self.num_tasks and not is_set(&self.bad):
                if self._does(&self.tasks[at]):
                    set_flag(&self.bad)
                at = taken(&self.next)
            bad = is_set(&self.bad)
        return not bad

    def end(self):
        """The frame is in."""
        for accumulator in self.accumulators:
            (<Accumulator>accumulator).end()
        self._forget()

    cpdef cancel(self):
        """The frame that was begun will not come."""
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
        if self.adding:
            return part_add(t.part, t.index, t.sources, t.num_sources, t.dim, t.wide, True, self.frame, t.number,
                            t.num_parts)
        return part_check(t.index, t.sources, t.num_sources, t.dim, t.wide, t.number, t.num_parts)

    cdef Py_ssize_t _share_out(self, Py_ssize_t num_checks) except -1:
        cdef Accumulator a
        cdef Task* task
        cdef Py_ssize_t number, num_parts
        self.num_tasks, self.next, self.bad, self.adding = 0, 0, 0, num_checks == 0
        for accumulator in self.accumulators:
            a = accumulator
            num_parts = num_checks or a.num_parts
            self._reserve(self.num_tasks + num_parts)
            for number in range(num_parts):
                task = &self.tasks[self.num_tasks]
                task.part = &a.parts[number] if self.adding else NULL
                task.index, task.sources, task.num_sources = (
                    &a.index, a.arriving.sources, a.arriving.num_sources)
                task.dim, task.wide, task.number, task.num_parts = a.dim, a.wide, number, num_parts
                self.num_tasks += 1
        return self.num_tasks

    cdef int _reserve(self, Py_ssize_t num_tasks) except -1:
        cdef Py_ssize_t wanted = max(num_tasks, 2 * self.room)
        cdef Task* grown
        if num_tasks > self.room:
            grown = <Task*>PyMem_Realloc(self.tasks, wanted * sizeof(Task))
            if grown == NULL:
                raise MemoryError(f"no memory for {wanted} tasks")
            self.tasks, self.room = grown, wanted
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
