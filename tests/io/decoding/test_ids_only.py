"""Reading a log without its gradients: no byte of them is read, where the container allows, and ids are as ever."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from batches import batch
from ipc import log, stream

from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions

DIM, ROWS = 64, 40_000


def batch_of(num_rows=ROWS, **columns):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((num_rows, DIM))
    return batch(rng.integers(-(2**63), 2**63 - 1, num_rows), values, step=np.arange(num_rows) // 5000, **columns)


class Counting(io.BytesIO):
    """A file that counts the bytes read."""

    num_read = 0

    def read(self, size=-1):
        data = super().read(size)
        self.num_read += len(data)
        return data


def parquet(batch, **options):
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_batches([batch]), sink, row_group_size=10_000, **options)
    return sink.getvalue().to_pybytes()


def ipc_file(batch, **options):
    return stream([batch.slice(start, 5000) for start in range(0, ROWS, 5000)], make=pa.ipc.new_file, **options)


def frames_of(source, ids_only, **options):
    sizes = {"user": (0, 0 if ids_only else DIM), "item": (0, 0 if ids_only else DIM)}
    table = options.pop("table", "user")
    reader = FrameReader(source, ReadOptions(sizes, table=table, ids_only=ids_only, unvalidated=True, **options))
    return [
        (
            frame.local_step,
            {table: np.concatenate([rows.ids for rows in blocks]).tolist() for table, blocks in frame.rows.items()},
        )
        for frame in reader
    ]


@pytest.mark.parametrize(
    "content",
    [lambda: parquet(batch_of()), lambda: parquet(batch_of(), compression="none"), lambda: ipc_file(batch_of())],
    ids=["parquet", "parquet without compression", "IPC file"],
)
def test_only_the_bytes_of_ids_and_steps_are_read(content):
    data = content()
    every, few = Counting(data), Counting(data)
    assert frames_of(few, True) == frames_of(every, False)
    gradients, others = ROWS * DIM * 4, ROWS * 16
    assert every.num_read > gradients
    assert few.num_read < 2 * others < gradients / 5


@pytest.mark.parametrize("write", [lambda batches: stream(batches), log], ids=["stream", "log"])
def test_gradients_of_a_mapped_stream_may_be_anything(tmp_path, write):
    batches = [batch_of().slice(start, 5000) for start in range(0, ROWS, 5000)]
    data = bytearray(write(batches))
    path = tmp_path / "log.arrows"
    path.write_bytes(data)
    expected = frames_of(path, False)
    for part in batches:
        values = np.asarray(part["gradient"].flatten()).tobytes()
        offset = data.index(values)
        data[offset : offset + len(values)] = b"\xff" * len(values)  # NaN
    path.write_bytes(data)
    assert frames_of(path, True) == expected


def test_a_log_that_is_read_without_gradients_still_needs_its_closing_record_and_order(tmp_path):
    whole = log([batch_of(100).slice(start, 10) for start in range(0, 100, 10)])
    reader = FrameReader(io.BytesIO(whole), ReadOptions({"user": (0, 0)}, ids_only=True))
    assert len(list(reader)) == 1
    assert not reader.verified
    with pytest.raises(InputError, match=r"the log has no closing record after batch 8|the stream was cut"):
        frames_of(io.BytesIO(whole[: len(whole) * 85 // 100]), True)


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.int64()])
@pytest.mark.parametrize("gradient", ["list", "float16", "null"])
def test_ids_of_any_type_next_to_gradients_of_any_kind(kind, gradient):
    lists = {
        "list": pa.array([[1.0] * DIM] * 20, pa.list_(pa.float32())),
        "float16": pa.array([[np.float16(1)] * DIM] * 20, pa.list_(pa.float16(), DIM)),
        "null": pa.array([None] * 20, pa.list_(pa.float32(), DIM)),
    }
    batch = pa.record_batch(
        {
            "gradient": lists[gradient],
            "id": pa.array(range(20), kind),
            "step": pa.array([0, 0, 1, 1] * 5),
            "table": pa.array(["user", "item"] * 10).dictionary_encode(),
        }
    )
    frames = frames_of([batch], True)
    assert len(frames) == 10
    assert frames[0] == (0, {"user": [0], "item": [1]})


def test_a_log_must_still_have_gradients_of_a_known_type():
    batch = pa.record_batch({"id": [1, 2], "step": [0, 0]})
    with pytest.raises(InputError, match="no column for the role 'gradient'"):
        frames_of([batch], True)


def test_bad_ids_are_found_and_bad_gradients_are_not():
    batch = pa.record_batch({"id": [1, None, 3], "gradient": pa.array([[np.nan] * 3] * 3), "step": [0, 0, 0]})
    with pytest.raises(InputError, match="column 'id': expected an id, got null"):
        frames_of([batch], True)
    assert frames_of([batch], True, on_bad_row="drop") == [(0, {"user": [1, 3]})]
