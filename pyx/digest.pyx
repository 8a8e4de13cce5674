"""What a checkpoint's files prove themselves by: BLAKE2bp, four leaves at once where hashlib's BLAKE2b does one.

Its definition and its loops stand in blake2bp.h; hashlib can say the same slowly (reference.digest). The
first 32 bytes of the 64 are used.
"""

from libc.stdint cimport uint8_t


cdef extern from "blake2bp.h" nogil:
    enum: BLAKE2_DIGEST
    ctypedef struct Blake2bp:
        pass
    void blake2bp_begin(Blake2bp* b)
    void blake2bp_update(Blake2bp* b, const uint8_t* bytes, size_t num_bytes)
    void blake2bp_digest(const Blake2bp* b, uint8_t* digest)


# Less is done before another thread could take the interpreter over, and not worth asking for it back.
cdef enum:
    SMALL_BYTES = 4096


cdef class Digest:
    """Of the bytes it is given, in order. One thread at a time."""
    cdef Blake2bp state

    def __cinit__(self):
        blake2bp_begin(&self.state)

    def update(self, const uint8_t[::1] data not None):  # IN
        """The next bytes."""
        cdef size_t num_bytes = data.shape[0]
        if 0 < num_bytes < SMALL_BYTES:
            blake2bp_update(&self.state, &data[0], num_bytes)
        elif num_bytes:
            with nogil:
                blake2bp_update(&self.state, &data[0], num_bytes)

    def hexdigest(self):
        """Of all bytes so far; more may come."""
        cdef uint8_t digest[BLAKE2_DIGEST]
        blake2bp_digest(&self.state, digest)
        return digest[:32].hex()
