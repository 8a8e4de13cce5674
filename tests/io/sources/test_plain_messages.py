"""Runs of plain batches, read from the messages of mapped files, are what pyarrow reads of them one by one."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from columns import outcome
from evidence import IS_EVIDENCE, more_as_evidence
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc import stream

from penstock.io.decoding.reader import ReadOptions
from penstock.io.sources import plain_messages
from penstock.pyx.plain_batches import RepeatedMessages

VOCABULARY, DIM = 10, 2
OPTIONS = ReadOptions({"t": (VOCABULARY, DIM)}, unvalidated=True)
NEW = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}


def batch(sizes, steps, seed=0, bad=()):
    """Rows of frames of these sizes. steps : of each; None: no column; bad : rows whose id is no row of the table"""
    rng, rows = np.random.default_rng(seed), sum(sizes)
    ids, values = rng.integers(0, VOCABULARY, rows), rng.standard_normal(rows * DIM).astype(np.float32)
    for row in bad:
        ids[row % rows] = VOCABULARY
    columns = {"id": ids, "gradient": pa.FixedSizeListArray.from_arrays(values, DIM)}
    if steps is not None:
        columns["step"] = pa.array(np.repeat(np.array(steps, np.int64), sizes))
    return pa.record_batch(columns)


def write(path, container, batches, **options):
    path.write_bytes(stream(batches, make=NEW[container], **options))
    return path


def by_pyarrow(source, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_messages, "_pattern", lambda *_: None)
        return outcome(source, options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


FRAMES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(FRAMES, min_size=1, max_size=6),
    st.sampled_from(["stream", "file"]),
    st.booleans(),
    st.sampled_from(["error", "drop", "quarantine"]),
    st.sampled_from([None, 3, "batch"]),
    st.lists(st.integers(0, 60), max_size=2),
    st.sampled_from(["", "other", "text", "empty"]),
    st.booleans(),
)
def test_runs_of_batches_equal_batches_one_by_one(
    folder, frames, container, has_steps, on_bad_row, contribution_rows, bad, more, is_ids_only
):
    batches = [
        batch(
            [size for size, _ in sizes], [step for _, step in sizes] if has_steps else None, number, bad[number % 2 :]
        )
        for number, sizes in enumerate(frames)
    ]
    if more == "other":
        batches = [b.append_column("other", pa.array(np.arange(len(b), dtype=np.int16))) for b in batches]
    if more == "text":
        batches = [b.append_column("text", pa.array(["x"] * len(b))) for b in batches]
    if more == "empty":
        batches = [part for b in batches for part in (b, b.slice(0, 0))]
    path = write(folder / "log.arrow", container, batches)
    options = replace(OPTIONS, on_bad_row=on_bad_row, contribution_rows=contribution_rows, ids_only=is_ids_only)
    assert repr(outcome(path, options)) == repr(by_pyarrow(path, options))


@pytest.fixture
def num_messages(monkeypatch):
    """How many batches were read at once."""
    numbers, read = [], plain_messages.PlainMessages.read

    def count(self, *arguments):
        run = read(self, *arguments)
        numbers.append(0 if run is None else run.num_batches)
        return run

    monkeypatch.setattr(plain_messages.PlainMessages, "read", count)
    return numbers


@pytest.mark.parametrize("container", NEW)
def test_batches_of_any_sizes_are_read_at_once(tmp_path, num_messages, container):
    log = write(tmp_path / "log", container, [batch([1 + step % 3], [step], step) for step in range(50)])
    frames, error, _ = outcome(log, OPTIONS)
    assert (len(frames), error) == (50, None)
    assert max(num_messages) == 49  # pyarrow reads the first one


def test_a_batch_that_continues_a_step_is_not_read_at_once_with_the_one_before(tmp_path, num_messages):
    log = write(tmp_path / "log", "stream", [batch([2], [step]) for step in (0, 1, 2, 2, 3, 4)])
    frames, _, _ = outcome(log, OPTIONS)
    assert [frame[1] for frame in frames] == [2, 2, 4, 2, 2]
    assert [number for number in num_messages if number] == [2, 3]


OTHERS = {
    "a null": [batch([2], [0]).set_column(0, "id", pa.array([1, None])) for _ in range(3)],
    "a dictionary": [batch([2], [0]).append_column("c", pa.array(["x", "y"]).dictionary_encode()) for _ in range(3)],
    "booleans": [batch([2], [0]).append_column("c", pa.array([True, False])) for _ in range(3)],
}
OPTIONS_OF_WRITERS = {"compression": {"compression": "zstd"}, "metadata": {"metadata": [{"k": "v"}] * 3}}


@pytest.mark.parametrize("form", [*OTHERS, *OPTIONS_OF_WRITERS])
def test_other_batches_are_read_one_by_one(tmp_path, num_messages, form):
    batches = OTHERS.get(form, [batch([2], [step]) for step in range(3)])
    path = write(tmp_path / "log", "stream", batches, **OPTIONS_OF_WRITERS.get(form, {}))
    assert repr(outcome(path, OPTIONS)) == repr(by_pyarrow(path, OPTIONS))
    assert not any(num_messages)


@more_as_evidence
@pytest.mark.parametrize("container", NEW)
def test_a_damaged_log_gives_the_frames_and_the_error_that_it_gives_batch_by_batch(tmp_path, container):
    path = write(tmp_path / "log", container, [batch([1 + step % 3], [step], step) for step in range(6)])
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for offset in rng.choice(len(whole), 300 if IS_EVIDENCE else 100, replace=False):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << rng.integers(8)
        for data in (bytes(damaged), whole[:offset]):
            path.write_bytes(data)
            assert repr(outcome(path, OPTIONS)) == repr(by_pyarrow(path, OPTIONS)), offset


@pytest.mark.parametrize(
    ("buffers", "columns", "message"),
    [
        ([[0, 8]], (1, -1, -1), "expected a buffer of 8 bytes per row as number 1 of 1"),
        ([[0, 4]], (0, -1, -1), "expected a buffer of 8 bytes per row as number 0 of 1"),
        ([[0, 8]], (0, 0, -1), "expected a buffer of 12 bytes per row as number 0 of 1"),
        ([[60, 8]], (0, -1, -1), "expected buffers in 64 bytes, got one at 60"),
    ],
)
def test_wrong_patterns_are_errors(buffers, columns, message):
    numbers = np.array([[0, 1], [8, 0]])
    with pytest.raises(ValueError, match=message):
        RepeatedMessages(bytes(64), np.zeros(64, np.uint8), numbers, np.array(buffers), *columns, 3)


# ---- batches of several tables

SEVERAL = ReadOptions({"a": (900, 2), "b": (900, 3), "c": (900, 2)}, unvalidated=True)
LISTS = {"list": pa.list_, "large": pa.large_list, "fixed": lambda kind: pa.list_(kind, 2)}
TABLE_RUN = st.tuples(st.sampled_from([0, 0, 1, 2, 3]), st.integers(1, 400), st.integers(5, 6))  # code, rows, step


def coded_batch(runs, names=("a", "b", "c", "unknown"), kind="list", codes=np.int32, has_steps=True, more=(0, 0)):
    """A batch of runs of rows of one table. more : floats more than its table's dim that a row has, and which row"""
    each = [run for run in runs for _ in range(run[1])]
    dims = {"b": 2 if kind == "fixed" else 3}
    lengths = np.array([dims.get(names[code], 2) for code, _, _ in each])
    if kind != "fixed":
        lengths[more[1] % len(each)] += more[0]
    values = np.arange(lengths.sum(), dtype=np.float32)
    lists = [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]
    indices = pa.array([code for code, _, _ in each], pa.from_numpy_dtype(codes))
    columns = {
        "table": pa.DictionaryArray.from_arrays(indices, pa.array(names)),
        "id": pa.array(np.arange(len(each))),
        "gradient": pa.array(lists, LISTS[kind](pa.float32())),
    }
    if has_steps:
        columns["step"] = pa.array([step for _, _, step in each], pa.int64())
    return pa.record_batch(columns)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(TABLE_RUN, min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from(["stream", "file"]),
    st.sampled_from(list(LISTS)),
    st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    st.booleans(),
    st.sampled_from(["error", "drop", "quarantine"]),
    st.sampled_from([None, 300, "batch"]),
    st.tuples(st.sampled_from([0, 0, 0, 1]), st.integers(0, 500)),
    st.booleans(),
)
def test_batches_of_several_tables_equal_those_that_pyarrow_reads(
    folder, runs, container, kind, codes, has_steps, on_bad_row, contribution_rows, more, has_other
):
    batches = [coded_batch(each, kind=kind, codes=codes, has_steps=has_steps, more=more) for each in runs]
    if has_other:
        batches = [b.add_column(0, "other", pa.array(np.arange(len(b), dtype=np.int16))) for b in batches]
    path = write(folder / "log.arrow", container, batches)
    options = replace(SEVERAL, on_bad_row=on_bad_row, contribution_rows=contribution_rows)
    assert repr(outcome(path, options)) == repr(by_pyarrow(path, options))


@pytest.mark.parametrize("container", NEW)
@pytest.mark.parametrize("kind", LISTS)
def test_batches_of_several_tables_are_read_without_pyarrow(tmp_path, num_messages, container, kind):
    runs = [(0, 300, 5), (2, 300, 5)]
    path = write(tmp_path / "log", container, [coded_batch(runs, kind=kind) for _ in range(6)])
    _, error, _ = outcome(path, SEVERAL)
    assert error is None
    assert sum(num_messages) == 5


def test_a_stream_may_replace_its_dictionary(tmp_path, num_messages):
    names = [("a",), ("a",), ("c",), ("c",), ("a",), ("b",), ("b",)]
    path = write(tmp_path / "log", "stream", [coded_batch([(0, 300, 5)], each, has_steps=False) for each in names])
    frames, error, _ = outcome(path, SEVERAL)
    assert error is None
    assert [list(frame[0]) for frame in frames] == [list(each) for each in names]
    assert sum(num_messages) == 3


@pytest.mark.parametrize("container", NEW)
def test_a_dictionary_may_grow(tmp_path, num_messages, container):
    names = [("a",), ("a",), ("a", "b"), ("a", "b"), ("a", "b", "c"), ("a", "b", "c")]
    batches = [coded_batch([(len(each) - 1, 300, 5)], each, has_steps=False) for each in names]
    path = write(tmp_path / "log", container, batches, emit_dictionary_deltas=True)
    frames, error, _ = outcome(path, replace(SEVERAL, contribution_rows="batch"))
    assert error is None
    assert [list(frame[0]) for frame in frames] == [[each[-1]] for each in names]
    assert sum(num_messages) == (3 if container == "stream" else 5)


@pytest.mark.parametrize("container", NEW)
def test_rows_of_mixed_tables_in_messages_without_pyarrow_are_read_row_by_row(tmp_path, num_messages, container):
    batches = [coded_batch([(number % 2, 1, 5) for number in range(40)]) for _ in range(4)]
    path = write(tmp_path / "log", container, batches)
    assert repr(outcome(path, SEVERAL)) == repr(by_pyarrow(path, SEVERAL))
    assert sum(num_messages) == 3


@more_as_evidence
@pytest.mark.parametrize("container", NEW)
def test_a_damaged_log_of_several_tables_gives_what_it_gives_batch_by_batch(tmp_path, container):
    batches = [coded_batch([(0, 20, 5), (1, 20, 5 + step % 2)]) for step in range(6)]
    path = write(tmp_path / "log", container, batches)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for offset in rng.choice(len(whole), 300 if IS_EVIDENCE else 100, replace=False):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << rng.integers(8)
        for data in (bytes(damaged), whole[:offset]):
            path.write_bytes(data)
            assert repr(outcome(path, SEVERAL)) == repr(by_pyarrow(path, SEVERAL)), offset
