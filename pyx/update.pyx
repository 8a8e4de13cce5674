"""The optimizer's step on a CPU, as the host says it: what the handlers read when XLA calls them.

A program on the devices gets the table and one small constant array per device that names a ``Step``:
host memory that says what to do with which host arrays. So nothing is staged, padded or copied, and one
program serves every number of rows. A Step and its arrays must stay as they are until the program that was
given it is done.
"""

import numpy as np

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t

from ._types cimport grad_t, id_t

from .handlers import handlers


cdef extern from "update_rules.h" nogil:
    enum: NUM_RULES
    ctypedef struct RuleEntry:
        const char* name
        int num_slots
        UpdateRows run
    const RuleEntry* rules_of_target(int n, const char** name)


def targets():
    """The instruction sets that the rules are compiled for and this machine has, the best first."""
    cdef const char* name
    cdef int n = 0
    found = []
    while rules_of_target(n, &name) != NULL:
        found.append(name.decode())
        n += 1
    return found


def rules():
    """Name → number of slots of every rule in update_rules.h."""
    cdef const char* name
    cdef const RuleEntry* entries = rules_of_target(0, &name)
    cdef int i
    return {entries[i].name.decode(): entries[i].num_slots for i in range(NUM_RULES)}


cdef class Plan:
    """What is fixed for a table: its rule, where its rows live, on how many threads it is updated.

    rule : one of ``rules``
    numbers : the rule's parameters, switches and limits, by the field names of Rule; one that is missing is 0
    starts : what weights and slots begin with
    num_shards, mod, rows_per_shard, shards_per_device : as in partition.place
    threads : at most so many per device; 0: as many as XLA's pool has
    target : one of ``targets``; "": the best
    """
    cdef Table table
    cdef readonly object zeros

    def __init__(self, str rule, numbers, starts, int64_t dim, int64_t vocabulary_size, int64_t num_shards, bint mod,
                 int64_t rows_per_shard, int64_t shards_per_device, bint non_lazy, int64_t threads, str target=""):
        cdef Table* t = &self.table
        cdef const RuleEntry* entry = entry_of(rule, target)
        cdef grad_t[::1] zeros
        if len(starts) != 1 + entry.num_slots:
            raise ValueError(f"{rule}: expected {1 + entry.num_slots} starts, got {len(starts)}")
        t.run, t.num_parts, t.dim, t.threads, t.non_lazy = entry.run, len(starts), dim, threads, non_lazy
        for part in range(len(starts)):
            t.starts[part] = starts[part]
        self.zeros = np.zeros(max(1, dim), np.float32)
        zeros = self.zeros
        t.zeros = &zeros[0]
        t.vocabulary_size, t.num_shards, t.mod = vocabulary_size, num_shards, mod
        t.rows_per_shard, t.shards_per_device = rows_per_shard, shards_per_device
        t.quotient = vocabulary_size // num_shards
        t.longer = vocabulary_size % num_shards * (t.quotient + 1)
        t.per_shards, t.per_longer = 1.0 / num_shards, 1.0 / (t.quotient + 1)
        t.per_quotient = 1.0 / max(1, t.quotient)
        set_rule(&t.rule, {**dict.fromkeys(NUMBERS, 0.0), **numbers})


NUMBERS = (
    "gradient_min gradient_max weight_min weight_max weight_decay momentum exponent beta beta1 beta2 rho epsilon "
    "lr_power l1 l2 max_var_update max_accumulator tau max_delta outlier_threshold decay_times_learning_rate "
    "use_nesterov use_sum_inside_sqrt update_accumulator_first multiply_linear_by_lr"
).split()


cdef const RuleEntry* entry_of(str rule, str target) except NULL:
    cdef const char* name = NULL
    cdef int i, n = targets().index(target) if target else 0
    cdef const RuleEntry* entries = rules_of_target(n, &name)
    for i in range(NUM_RULES):
        if entries[i].name.decode() == rule:
            return &entries[i]
    raise ValueError(f"no rule '{rule}'")


cdef int set_rule(Rule* r, numbers) except -1:
    r.gradient_min, r.gradient_max = numbers["gradient_min"], numbers["gradient_max"]
    r.weight_min, r.weight_max = numbers["weight_min"], numbers["weight_max"]
    r.weight_decay, r.decay_times_learning_rate = numbers["weight_decay"], numbers["decay_times_learning_rate"]
    r.momentum, r.use_nesterov = numbers["momentum"], numbers["use_nesterov"]
    r.exponent, r.beta, r.rho, r.epsilon = numbers["exponent"], numbers["beta"], numbers["rho"], numbers["epsilon"]
    r.beta1, r.beta2 = numbers["beta1"], numbers["beta2"]
    r.use_sum_inside_sqrt = numbers["use_sum_inside_sqrt"]
    r.lr_power, r.l1, r.l2 = numbers["lr_power"], numbers["l1"], numbers["l2"]
    r.multiply_linear_by_lr = numbers["multiply_linear_by_lr"]
    r.max_var_update, r.max_accumulator = numbers["max_var_update"], numbers["max_accumulator"]
    r.update_accumulator_first = numbers["update_accumulator_first"]
    r.tau, r.max_delta, r.outlier_threshold = numbers["tau"], numbers["max_delta"], numbers["outlier_threshold"]
    return 0


cdef class Step:
    """One thing to do to a table's rows: host memory at ``address`` that a handler reads when its turn comes.

    May be set anew when the program that was given it is done, and not before. Holds the arrays until then.
    """
    cdef Order order
    cdef Py_ssize_t room
    cdef Plan plan
    cdef object held

    def __cinit__(self, Plan plan not None):
        self.plan = plan
        self.order.table = &plan.table
        self.order.segments = NULL
        self._reserve(1)

    def __dealloc__(self):
        PyMem_Free(self.order.segments)

    @property
    def address(self):
        """Where it lies: what the program's operand says."""
        return <size_t>&self.order

    def update(self, segments, float lr):
        """One optimizer application to the rows of ids, distinct over all segments.

        segments : (ids int64 (n,), gradients float32 (n, dim)) each
        """
        self._begin(UPDATE, len(segments))
        self.order.lr = lr
        for ids, grads in segments:
            self._add(ids, grads)
        self.held = segments

    def copy(self, ids, values, int64_t part, bint write):
        """Set one part of the rows of distinct ids to values, or values to that part of the rows of any ids.

        ids : int64 (n,), or the first of consecutive ids
        values : float32 (n, dim); written where write is False
        """
        self._begin(WRITE if write else READ, 1)
        if not 0 <= part < self.plan.table.num_parts:
            raise ValueError(f"expected 0 <= part < {self.plan.table.num_parts}, got {part}")
        self.order.part = part
        self._add(ids, values)
        self.held = ids, values

    def copy_all(self, ids, grad_t[:, :, ::1] values not None):
        """All parts of the rows of any ids into values. ids : as in ``copy``; values : OUT float32 (parts, n, dim)"""
        if values.shape[0] != self.plan.table.num_parts:
            raise ValueError(f"expected room for {self.plan.table.num_parts} parts, got {values.shape[0]}")
        self._begin(READ_ALL, 1)
        self.order.plane_floats = values.shape[1] * values.shape[2]
        self._add(ids, values[0])
        self.held = ids, values

    def release(self):
        """Let go of the arrays: the program is done."""
        self.held = None
        self.order.num_segments = self.order.num_claims = 0

    cdef int _begin(self, Op op, Py_ssize_t num_segments) except -1:
        self.release()
        self._reserve(num_segments)
        self.order.op = op
        return 0

    cdef int _add(self, ids, values) except -1:
        cdef Segment* segment = &self.order.segments[self.order.num_segments]
        cdef const id_t[::1] keys
        cdef const grad_t[:, ::1] rows = values  # one row after the other
        segment.ids, segment.first, segment.num_rows = NULL, 0, rows.shape[0]
        segment.values = <grad_t*>&rows[0, 0] if rows.shape[0] else NULL
        if rows.shape[1] != self.plan.table.dim:
            raise ValueError(f"expected rows of {self.plan.table.dim} floats, got {rows.shape[1]}")
        if isinstance(ids, int):
            segment.first = ids
        else:
            keys = ids
            if keys.shape[0] != rows.shape[0]:
                raise ValueError(f"expected {keys.shape[0]} rows for as many ids, got {rows.shape[0]}")
            segment.ids = &keys[0] if keys.shape[0] else NULL
        segment.first_claim = self.order.num_claims
        self.order.num_claims += chunks(segment.num_rows)
        self.order.num_segments += 1
        return 0

    cdef int _reserve(self, Py_ssize_t num_segments) except -1:
        if num_segments > self.room:
            PyMem_Free(self.order.segments)
            self.room = 0
            self.order.segments = <Segment*>PyMem_Malloc(num_segments * sizeof(Segment))
            if self.order.segments == NULL:
                raise MemoryError(f"no memory for {num_segments} segments")
            self.room = num_segments
        return 0
