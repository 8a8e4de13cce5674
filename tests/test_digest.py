"""The digest of a checkpoint's files: BLAKE2bp, as hashlib says it slowly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pyx import reference
from penstock.pyx.digest import Digest


@given(
    st.lists(
        st.one_of(st.binary(max_size=300), st.integers(0, 3000).map(lambda n: (bytes(range(251)) * 12)[:n])), max_size=6
    )
)
def test_the_digest_is_blake2bp_however_the_bytes_come(pieces):
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    assert digest.hexdigest() == reference.digest(b"".join(pieces))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 1536, 1537, 100_003])
def test_the_digest_at_the_ends_of_blocks_and_stripes(size):
    data = np.random.default_rng(size).bytes(size)
    whole, halves = Digest(), Digest()
    whole.update(data)
    assert whole.hexdigest() == reference.digest(data)
    halves.update(data[: size // 2])
    halves.hexdigest()  # a look at it changes nothing
    halves.update(data[size // 2 :])
    assert halves.hexdigest() == reference.digest(data)
