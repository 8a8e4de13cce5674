# Which owner a key has.
from libc.stdint cimport int64_t, uint64_t

from penstock.pyx._types cimport id_t

cdef owners_of(const id_t[::1] keys, uint64_t salt, int64_t capacity, int64_t count)
