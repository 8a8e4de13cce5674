"""Rows read without a lock, as far as no thread is writing them, against NumPy."""

import numpy as np
import pytest
from accumulate import int64
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pyx.row_reads import RowReads
from penstock.rows.shared.header import TableLayout

# Words of a thread before those of its pages, and rows of a page: pyx/page_counters.h.
PAGES_BEGIN, PAGE_ROWS = 8, 64


class Parts:
    """A table, its shards in turns on several devices, with the batches that each thread has written there."""

    def __init__(self, vocabulary, parts, threads, dim, row_floats):
        self.vocabulary, self.parts, self.dim = vocabulary, parts, dim
        self.rows_per_part = -(-vocabulary // parts)
        num_floats, num_pages = self.rows_per_part * row_floats, -(-self.rows_per_part // PAGE_ROWS)
        self.rows = np.arange(parts * num_floats, dtype=np.float32).reshape(parts, -1, row_floats)
        self.counters = np.zeros((parts, threads, PAGES_BEGIN + num_pages), np.uint64)
        arrays = [(self.rows[part].reshape(-1), self.counters[part]) for part in range(parts)]
        shards = {"num_shards": parts, "mod": True, "rows_per_shard": self.rows_per_part, "shards_per_part": 1}
        places = {"row_floats": row_floats, "first_float": 0, "first_page": 0, "rows": (), "pages": ()}
        self.reads = RowReads(TableLayout(name="t", dim=dim, num_rows=vocabulary, **shards, **places), arrays, None)

    def copyable(self, key):
        """Whether the last batches of all threads at the page of a key are complete."""
        row, part = divmod(key, self.parts)
        return (self.counters[part, :, PAGES_BEGIN + row // PAGE_ROWS] <= self.counters[part, :, 0]).all()

    def read(self, ids):
        """Return the number of rows that are read, and the rows."""
        out = np.full((len(ids), self.dim), np.nan, np.float32)
        return self.reads.read(int64(ids), out, np.zeros(len(ids), np.uint8)), out


@given(
    st.integers(1, 400),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (3, 5), (16, 16), (24, 48)]),
    st.lists(st.integers(0, 399), max_size=80),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_rows_are_read_up_to_the_first_one_that_is_being_written(vocabulary, parts, threads, floats, ids, random):
    table = Parts(vocabulary, parts, threads, *floats)
    for numbers in table.counters.reshape(-1, table.counters.shape[-1]):
        numbers[0] = random.randrange(100)
        for page in range(PAGES_BEGIN, len(numbers)):
            numbers[page] = numbers[0] + 1 if random.random() < 0.1 else random.randint(0, int(numbers[0]))
    ids = [key % vocabulary for key in ids]
    num_copied = next((number for number, key in enumerate(ids) if not table.copyable(key)), len(ids))
    num_read, out = table.read(ids)
    assert num_read == num_copied
    for key, row in zip(ids[:num_copied], out, strict=False):
        assert row.tobytes() == table.rows[key % parts, key // parts, : table.dim].tobytes()
    assert np.isnan(out[num_copied:]).all()


def test_batches_of_another_device_say_nothing_about_a_page():
    """The second device's first batch is being written, while the first device has completed nine."""
    table = Parts(vocabulary=4, parts=2, threads=1, dim=3, row_floats=3)
    table.counters[0, 0, [0, PAGES_BEGIN]] = 9
    table.counters[1, 0, PAGES_BEGIN] = 1
    assert table.read([0, 2, 1])[0] == 2
    table.counters[1, 0, 0] = 1
    assert table.read([0, 2, 1])[0] == 3


def test_an_id_outside_the_table_is_named():
    with pytest.raises(ValueError, match="id 9 is no row of the table"):
        Parts(vocabulary=4, parts=1, threads=1, dim=3, row_floats=3).read([1, 9])
