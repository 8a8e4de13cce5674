"""Takes a run of small frames through the gate, the sums and the update of their table, without Python in between.

Frame by frame it does what ``Pipeline.add`` and ``EngineCore._step`` do, by the same kernels and the same counters. It
stops before a frame that Python has to see: a stale one, a bad one, a large one, or one that would open the gate where
it may not. So a frame is in completely, or not at all.
"""

import numpy as np

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from ._types cimport id_t, index_t
from .accumulator cimport Accumulator
from .coalesce cimport Frame, Part, Source, Vocabulary, divide, harmless, part_begin, part_clear, part_find, part_undo
from .gate_counts cimport GateCounts
from .gradient_blocks cimport GradientBlocks
from .id_table cimport id_buckets_reserve
from .row_sums cimport BAD, WORKED, part_check, part_fold
from .update cimport Step

cdef enum:
    # Rows of a frame, and ids of a step: more are worth the threads of other paths.
    MOST_SMALL_ROWS = 4096
    # Rows of all frames of one call: Python sees signals, progress and the clock every few milliseconds.
    MOST_ROWS = 1 << 15

SMALL_ROWS = MOST_SMALL_ROWS


cdef struct Run:                # one call of ``take``
    const index_t* bounds
    const id_t* steps           # NULL: no frame is stale
    Py_ssize_t stop, next
    Py_ssize_t room             # for ids between two openings
    index_t most_changes, number
    float rate
    bint mean
    double* seconds             # OUT, of each step
    id_t* changed               # OUT, the ids of all steps
    Py_ssize_t num_steps, num_changes, most_ids


cdef class FrameSteps:
    """The way of one table's frames: its gate, its sums and its rows.

    step, table : the tables in the host's memory, and the number of this one there; lock : of the step
    mean : divide sums by the number of frames of each id

    Of the last ``take``:
    num_steps : of the frames that were taken
    ids : int64, those of every step, one step after the other, num_ids of them; seconds : of every update
    more_bytes : of sums at most, next to what was held before
    """
    cdef GateCounts gate
    cdef Accumulator accumulator
    cdef Step step
    cdef object lock
    cdef Py_ssize_t table
    cdef bint mean
    cdef readonly Py_ssize_t num_steps, num_ids, more_bytes
    cdef readonly object ids, seconds

    def __init__(self, GateCounts gate not None, Accumulator accumulator not None, Step step not None,
                 lock, Py_ssize_t table, bint mean):
        if accumulator.frame.wide:
            raise ValueError("expected sums in float32")
        if not gate.required:
            raise ValueError("expected a gate that contributions open")
        self.gate, self.accumulator, self.step, self.lock = gate, accumulator, step, lock
        self.table, self.mean = table, mean

    def take(self, GradientBlocks blocks not None, const index_t[::1] bounds not None, const id_t[::1] steps,
             Py_ssize_t first, Py_ssize_t most_frames, index_t most_steps, index_t most_changes, float rate,
             index_t number):
        """Take the frames from ``first`` on, as many as may pass. Returns how many.

        blocks : of rows in order
        bounds : int64, (frames + 1,), ascending: the rows before each frame, which lies in one block
        steps : int64, (frames,), None: none is stale
        most_frames, most_steps, most_changes : stop after so many; the last counts the ids of every step
        rate : the learning rate of the table; number : of the first frame, as in ``Intake.begin``
        Raises ValueError or MemoryError: nothing has changed then.
        """
        cdef Accumulator accumulator = self.accumulator
        cdef Py_ssize_t stop, room, longest, num_rows, first_block, held = accumulator.held()
        cdef double[::1] seconds
        cdef id_t[::1] changed
        cdef Run run
        self.num_steps = self.more_bytes = 0
        if not 0 <= first < bounds.shape[0] - 1 or (steps is not None and steps.shape[0] != bounds.shape[0] - 1):
            raise ValueError(f"expected one of {bounds.shape[0] - 1} frames with a step each, got frame {first}")
        if blocks.dim != accumulator.dim or blocks.wide:
            raise ValueError(f"expected float32 of dim {accumulator.dim}, got {blocks.dim}")
        if held and accumulator.num_parts > 1:
            return 0
        most_frames = min(most_frames, bounds.shape[0] - 1 - first)
        stop = fitting(self.gate, bounds, first, most_frames, most_steps, held, &room, &longest)
        if stop == first:
            return 0
        first_block = check_inside(blocks, bounds, first, stop)
        num_rows = bounds[stop] - bounds[first]
        seconds_array, ids_array = np.empty(stop - first), np.empty(held + num_rows, np.int64)
        seconds, changed = seconds_array, ids_array
        accumulator.begin(blocks, number, 1, room, longest, num_rows)
        try:
            if accumulator.count and self.gate.required > 1:
                accumulator.start_marks()
            accumulator.frame.strict = True
            run.bounds = &bounds[0]
            run.steps = NULL
            if steps is not None:
                run.steps = &steps[0]
            run.stop, run.most_changes = stop, most_changes
            run.number, run.rate, run.mean, run.room = number, rate, self.mean, room
            run.seconds, run.changed = &seconds[0], &changed[0]
            run.next, run.num_steps, run.num_changes, run.most_ids = first, 0, 0, 0
            with self.lock:
                self.step.begin_small(self.table)
                with nogil:
                    take_frames(self.gate, accumulator, self.step, blocks, &run, first_block)
                self.step._release()
        except BaseException:
            accumulator.cancel()
            raise
        accumulator.end_steps(bounds[run.next] - bounds[first], run.most_ids)
        self.num_steps, self.num_ids = run.num_steps, run.num_changes
        self.ids, self.seconds = ids_array[:run.num_changes], seconds_array[:run.num_steps].tolist()
        self.more_bytes = max(<Py_ssize_t>0, run.most_ids - accumulator.held()) * accumulator.bytes_per_id()
        return run.next - first


cdef Py_ssize_t check_inside(GradientBlocks blocks, const index_t[::1] bounds, Py_ssize_t first, Py_ssize_t stop) except -1:
    """Return the block of the first frame. Raises ValueError where a frame does not lie in one block."""
    cdef Py_ssize_t i, first_block = blocks.block_of(bounds[first]), block = first_block
    for i in range(first, stop):
        while block + 1 < blocks.num_sources and blocks.starts[block + 1] <= bounds[i]:
            block += 1
        if block >= blocks.num_sources or bounds[i + 1] > blocks.starts[block + 1]:
            num_rows = 0 if block >= blocks.num_sources else blocks.sources[block].num_rows
            raise ValueError(f"expected rows {bounds[i]} to {bounds[i + 1]} in one block, got {num_rows} rows")
    return first_block


cdef Py_ssize_t fitting(GateCounts gate, const index_t[::1] bounds, Py_ssize_t first, Py_ssize_t most, index_t most_steps,
                        Py_ssize_t held, Py_ssize_t* room, Py_ssize_t* longest) except -1:
    """The frame before which a call ends at the latest.

    held : ids in the gate; room, longest : OUT the rows between two openings and of one frame, at most
    """
    cdef Py_ssize_t num_rows, waiting = 0, i = first
    cdef index_t accumulated = gate.num_accumulated
    room[0] = longest[0] = 0
    while i < first + most and most_steps:
        num_rows = bounds[i + 1] - bounds[i]
        if num_rows <= 0 or bounds[i] < 0:
            raise ValueError(f"expected ascending bounds, got {bounds[i]} and {bounds[i + 1]}")
        waiting += num_rows
        if held + waiting > MOST_SMALL_ROWS or bounds[i + 1] - bounds[first] > MOST_ROWS:
            break
        room[0], longest[0] = max(room[0], waiting), max(longest[0], num_rows)
        accumulated += 1
        if accumulated >= gate.required:
            held = waiting = accumulated = 0
            most_steps -= 1
        i += 1
    return i


cdef void take_frames(GateCounts gate, Accumulator accumulator, Step step, GradientBlocks blocks,
                      Run* run, Py_ssize_t block) noexcept nogil:
    """Frame by frame, up to the end or an event; ``run.next`` is the first frame that is not in.

    block : of the first frame
    """
    cdef Part* part = &accumulator.parts[0]
    cdef Vocabulary* vocabulary = &accumulator.vocabulary
    cdef Frame* frame = &accumulator.frame
    cdef const Source* whole
    cdef Source source = blocks.sources[block]
    cdef bint opens, bad
    cdef int no = 0
    cdef index_t begin
    frame.sources, frame.num_sources = &source, 1
    while run.next < run.stop:
        opens = gate.due(1)
        if run.steps != NULL and gate.behind(run.steps[run.next]):
            break
        if opens and not gate.may_open():
            break
        while blocks.starts[block + 1] <= run.bounds[run.next]:
            block += 1
        whole, begin = &blocks.sources[block], run.bounds[run.next] - blocks.starts[block]
        source.ids, source.rows, source.stride = whole.ids + begin, whole.rows + begin * whole.stride, whole.stride
        source.num_rows = run.bounds[run.next + 1] - run.bounds[run.next]
        frame.number = run.number
        part_begin(part)
        if part.num_ids:  # a bad row could not be taken out of the sums
            frame.harmless = harmless(part.largest, source.num_rows, False)
            if part_check(frame, vocabulary, 0, 1) != WORKED:
                break
        bad = part_find(part, vocabulary, frame, &no)
        if not bad and frame.dim:
            bad = part_fold(part, frame, &no) == BAD
        if bad:
            part_undo(part, vocabulary)
            break
        gate.num_accumulated += 1
        run.next += 1
        run.number += 1
        if opens:
            step_rows(accumulator, part, step, run, <uint64_t>gate.global_step + 1)
            gate.num_accumulated = 0
            gate.global_step += 1
            accumulator.first_frame = run.number
            # So many ids again, at most; where there is no memory for the index, another path says so.
            if vocabulary.entries == NULL and not id_buckets_reserve(&part.buckets, run.room, part.ids):
                break
            if run.num_changes >= run.most_changes:
                break
    frame.num_sources = 0


cdef void step_rows(Accumulator accumulator, Part* part, Step step, Run* run, uint64_t number) noexcept nogil:
    """Update the rows of what is held, and hold nothing. number : of steps afterwards"""
    cdef float* sums = <float*>part.sums
    cdef double began = seconds_now()
    if run.mean and part.marks != NULL:
        divide(part, sums, accumulator.dim)
    step.update_small(part.ids, sums, part.num_ids, run.rate, number)
    memcpy(run.changed + run.num_changes, part.ids, part.num_ids * sizeof(id_t))
    run.seconds[run.num_steps] = seconds_now() - began
    run.num_steps += 1
    run.num_changes += part.num_ids
    run.most_ids = max(run.most_ids, part.num_ids)
    if accumulator.vocabulary.entries != NULL:
        accumulator.vocabulary.base += <uint32_t>part.num_ids
    part_clear(part, &accumulator.vocabulary)


cdef double seconds_now() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec
