# Every element type of the kernels, once.
from libc.stdint cimport int64_t

ctypedef int64_t id_t      # an id of a table: 0 <= id < vocabulary_size <= 2**63 - 1
ctypedef int64_t index_t   # a dense index: the order of first appearance
ctypedef float grad_t      # gradients and their sums; TensorFlow keeps float32 on the device

ctypedef fused real_t:     # what a conditional accumulator may sum in; the engine's tables are float32
    float
    double
