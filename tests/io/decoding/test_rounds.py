"""``merge="round"``: a frame of each source in turn; the order of a job, too."""

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import InputError, UsageError
from penstock.io.decoding.reader import FrameReader, ReadOptions

SIZES = {"t": (100, 1)}


def source_of(ids):
    """One frame per id."""
    gradients = pa.array([[1.0]], pa.list_(pa.float32(), 1))
    return [pa.record_batch({"id": pa.array([i]), "gradient": gradients}) for i in ids]


def order_of(sources, **options):
    reader = FrameReader([iter(s) for s in sources], ReadOptions(SIZES, merge="round", **options))
    return [(number, int(frame.rows["t"][0].ids[0])) for number, frame in reader.numbered()]


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_every_round_has_the_next_frame_of_every_unfinished_source(logs):
    longest = max(map(len, logs))
    wanted = [(n, log[k]) for k in range(longest) for n, log in enumerate(logs) if k < len(log)]
    assert order_of(map(source_of, logs)) == wanted


def test_frames_before_a_bad_one_are_read_and_later_ones_are_not():
    logs = [source_of([1, 2]), source_of([3, 400]), source_of([5, 6])]
    frames = iter(FrameReader(logs, ReadOptions(SIZES, merge="round")))
    assert [int(next(frames).rows["t"][0].ids[0]) for _ in range(4)] == [1, 3, 5, 2]
    with pytest.raises(InputError, match="expected 0 <= id < 100"):
        next(frames)


def test_another_way_of_merging_is_refused():
    with pytest.raises(UsageError, match="expected one of None, 'step', 'round', got 'rounds'"):
        engine_of().run([np.zeros(0)], merge="rounds")
