"""The table of ids and the placing of ids on shards equal their NumPy twins, and the edges of each have a test."""

import numpy as np
import pytest
import reference
from accumulate import int64
from hypothesis import given
from hypothesis import strategies as st

from penstock.pyx.id_table import IdTable
from penstock.pyx.partition import destinations, locate

INT64_MAX = 2**63 - 1
EDGE_IDS = [0, -1, 1, INT64_MAX, -(2**63), 2**32, 2**32 - 1, 2**62]
id_arrays = st.lists(st.one_of(st.sampled_from(EDGE_IDS), st.integers(0, 40), st.integers(0, INT64_MAX)), max_size=200)


# ---- id table


@given(id_arrays, id_arrays)
def test_an_id_keeps_its_index(ids, others):
    table = IdTable()
    both = int64([*ids, *others])
    known = dict(zip(both.tolist(), reference.index(both).tolist(), strict=True))
    for group in (ids, others, ids):
        assert table.insert(int64(group)).tolist() == [known[i] for i in group]


def test_every_int64_may_be_an_id():
    table = IdTable()
    assert table.insert(int64(EDGE_IDS)).tolist() == list(range(len(EDGE_IDS)))
    assert table.insert(int64(EDGE_IDS)).tolist() == list(range(len(EDGE_IDS)))


@pytest.mark.parametrize("size", [7, 8, 9, 15, 16, 17, 1023, 1024, 1025])
def test_growth_moves_no_id_to_another_index(size):
    table = IdTable()
    for number in range(size):
        assert table.insert(int64([number << 20])).tolist() == [number]
    assert table.insert(np.arange(size) << 20).tolist() == list(range(size))


def test_ids_that_differ_only_in_their_high_bits_do_not_pile_up():
    ids = np.arange(50_000, dtype=np.int64) << 46
    assert IdTable().insert(ids).tolist() == list(range(50_000))  # quadratic probing time would never end


def test_ids_of_another_type_are_refused_not_wrapped():
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        IdTable().insert(np.array([2**63], np.uint64))


# ---- partition


def test_thirteen_ids_on_five_shards_as_tensorflow_deals_them():
    ids = np.arange(13)
    shards, rows = locate(ids, 13, 5, False)
    assert shards.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert rows.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1]
    shards, rows = locate(ids, 13, 5, True)
    assert [ids[shards == s].tolist() for s in range(5)] == [[0, 5, 10], [1, 6, 11], [2, 7, 12], [3, 8], [4, 9]]
    assert rows.tolist() == [i // 5 for i in range(13)]


@st.composite
def placements(draw):
    vocabulary_size = draw(st.integers(1, 300))
    num_shards = draw(st.integers(1, 40))
    num_owners = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, vocabulary_size - 1), max_size=100))
    shape = (-(-num_shards // num_owners), -(-vocabulary_size // num_shards), num_owners)
    return int64(ids), vocabulary_size, num_shards, draw(st.booleans()), *shape


@given(placements())
def test_placing_equals_the_twin(args):
    for a, b in zip(locate(*args[:4]), reference.locate(*args[:4]), strict=True):
        assert a.tolist() == b.tolist()
    *_, num_owners = args
    owners, rows, counts = (np.zeros(n, dtype) for n, dtype in ((len(args[0]), "i4"),) * 2 + ((num_owners, "i8"),))
    destinations(*args[:-1], 1, 0, owners, rows, None, counts)
    for a, b in zip((owners, rows), reference.place(*args), strict=True):
        assert a.tolist() == b.tolist()
    assert counts.tolist() == np.bincount(owners, minlength=num_owners).tolist()


@pytest.mark.parametrize("bad", [-1, 13, INT64_MAX])
def test_an_id_outside_the_vocabulary_is_an_error_never_another_row(bad):
    with pytest.raises(ValueError, match=rf"expected 0 <= id < 13, got {bad}"):
        locate(int64([3, bad]), 13, 5, False)
