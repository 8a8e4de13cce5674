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
        numbers.append(0 if run is None else len(run.rows.blocks))
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
