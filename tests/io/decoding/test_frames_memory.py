"""A long frame whose rows are mostly bad takes the memory of its good rows, not of the dropped ones."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from penstock.io.decoding import framing
from penstock.io.decoding.reader import FrameReader, ReadOptions

DIM, ROWS, BATCHES = 64, 4096, 24  # a megabyte a batch, all of them one frame
MEGABYTE = 1 << 20


def batch_of(bad, number):
    """Every hundredth row is good."""
    good = np.arange(ROWS) % 100 == 0
    values = np.full((ROWS, DIM), number, np.float32)
    ids = np.arange(ROWS)
    if bad == "id_out_of_range":
        ids = np.where(good, ids, -1)
    if bad == "gradient_not_finite":
        values[~good, 7] = np.nan
    flat = pa.array(values.reshape(-1))
    gradient = pa.FixedSizeListArray.from_arrays(flat, DIM)
    if bad == "length_mismatch":
        lengths = np.where(good, DIM, DIM - 1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        gradient = pa.ListArray.from_arrays(pa.array(offsets), flat.slice(0, int(offsets[-1])))
    table = pa.array(np.where(good, "t", "unknown" if bad == "unknown_table" else "t"))
    columns = [pa.array(ids, mask=~good if bad == "id_null" else None), gradient, table, pa.array(np.full(ROWS, 1))]
    return pa.RecordBatch.from_arrays(columns, ["id", "gradient", "table", "step"])


@pytest.mark.sampled("id_null-True", "id_out_of_range-True", "unknown_table-False", "length_mismatch-False")
@pytest.mark.parametrize("unvalidated", [True, False])
@pytest.mark.parametrize(
    "bad", ["id_null", "id_out_of_range", "unknown_table", "length_mismatch", "gradient_not_finite"]
)
def test_memory_does_not_grow_with_rows_that_are_dropped(monkeypatch, bad, unvalidated):
    monkeypatch.setattr(framing, "UNVALIDATED_BYTES", 4 * MEGABYTE)
    held = []

    def batches():
        for number in range(BATCHES):
            yield batch_of(bad, number)
            held.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())

    options = ReadOptions(sizes={"t": (ROWS, DIM)}, on_bad_row="drop", unvalidated=unvalidated)
    tracemalloc.start()
    try:
        (frame,) = [frame.audited() for frame in FrameReader(batches(), options)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    good = -(-ROWS // 100)
    assert frame.dropped == {bad: BATCHES * (ROWS - good)}
    assert [block.grads[0, 0] for block in frame.rows["t"]] == list(range(BATCHES))
    assert sum(len(block.ids) for block in frame.rows["t"]) == BATCHES * good
    assert max(held) - held[0] < 10 * MEGABYTE < BATCHES * MEGABYTE / 2
    assert peak < 20 * MEGABYTE


def test_a_long_frame_validated_in_pieces_equals_one_validated_whole(monkeypatch):
    def frame_of(most):
        monkeypatch.setattr(framing, "UNVALIDATED_BYTES", most)
        kinds = ["id_null", "id_out_of_range", "unknown_table", "gradient_not_finite", "none"]
        batches = [batch_of(kinds[n % 5], n) for n in range(12)]
        reader = FrameReader(batches, ReadOptions(sizes={"t": (ROWS, DIM)}, on_bad_row="drop", unvalidated=True))
        (frame,) = [frame.audited() for frame in reader]
        rows = [(block.ids.tolist(), block.gradient(0)[0]) for block in frame.rows["t"]]
        return frame.num_rows, frame.dropped, rows, reader.first_bad

    assert frame_of(3 * MEGABYTE) == frame_of(1 << 40)
