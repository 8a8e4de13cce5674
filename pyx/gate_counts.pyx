"""The rule of the gate: when a contribution is stale, when the gate opens, and what it counts.

``gate.Gate`` is its face in Python, which has the lock and the counts by contributor. ``frame_steps`` applies
the same rule to a run of frames, without Python.
"""

from libc.stdint cimport INT64_MAX, INT64_MIN

from ._types cimport index_t


cdef class GateCounts:
    """The counters of a gate. Call every method under the gate's lock.

    num_required : contributions that open the gate into its consumer; None: it opens only for takers in the queue
    max_staleness : steps that a contribution may be behind, at least 0
    """

    def __init__(self, num_required=None, index_t global_step=0, index_t max_staleness=0):
        self.required, self.max_staleness = num_required or 0, max_staleness
        self.global_step, self.num_accumulated = global_step, 0
        self.first_step, self.last_step = INT64_MIN, INT64_MAX - 1

    @property
    def num_required(self):
        return self.required or None

    @property
    def steps(self):
        """The global steps at which the gate can open, as a range; of all that there are, the step stays an int64."""
        return range(self.first_step, self.last_step + 1)

    @steps.setter
    def steps(self, steps):
        self.first_step, self.last_step = steps[0], steps[len(steps) - 1]

    def is_stale(self, local_step):
        """Return whether a contribution of this step is too far behind; one without a step never is."""
        return local_step is not None and self.behind(local_step)

    def is_due(self, index_t more=0):
        """Return whether the gate opens into its consumer with so many more contributions than it has."""
        return self.due(more)

    def can_open(self):
        """Return whether the global step is one of ``steps``."""
        return self.may_open()

    cdef bint behind(self, index_t local_step) noexcept nogil:
        # Their difference may be no int64.
        return local_step < self.global_step and <size_t>self.global_step - <size_t>local_step > <size_t>self.max_staleness

    cdef bint due(self, index_t more) noexcept nogil:
        return 0 < self.required <= self.num_accumulated + more

    cdef bint may_open(self) noexcept nogil:
        return self.first_step <= self.global_step <= self.last_step
