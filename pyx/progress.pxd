# Threads that share work: progress.h.
from libc.stdint cimport int64_t

cdef extern from "progress.h" nogil:
    enum: MOMENTS
    const int64_t ALL_DONE
    ctypedef struct ThreadTime:
        pass
    ThreadTime thread_time()
    bint lost_time_since(ThreadTime since)
    bint is_set(const int* flag)
    void set_flag(int* flag)
    bint takes(int* flag)
    int64_t count_down(int64_t* num_left)
    int64_t take_number(int64_t* counter)
    void publish(int64_t* progress, int64_t value)
    int64_t published(const int64_t* progress)
    void yield_a_moment(int number)
    void sleep_a_moment(int number)
    void enters(int* num_threads)
    bint leaves(int* num_threads)
    void lock(int* flag)
    void unlock(int* flag)
