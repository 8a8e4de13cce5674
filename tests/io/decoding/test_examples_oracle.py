"""Random example streams: the engine has, bit for bit, the state of a plain NumPy engine that follows the contract."""

import io
import re

import lookup_oracle
import numpy as np
import oracle
import pyarrow as pa
import pytest
from drawn import Drawn, DrawnTable, Stream, assert_same_state, configurations, streams
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st
from ipc import stream
from quarantines import rows_of

import penstock as ps


def remaining_source(batches, frames, number):
    """Return the batches and the frames that follow one frame of a source."""
    num_skipped = sum(len(frame) for frame in frames[: number + 1])
    remaining_frames = [[(n - num_skipped, example) for n, example in frame] for frame in frames[number + 1 :]]
    remaining_batches, num_left_to_skip = [], num_skipped
    for batch in batches:
        remaining_batches.append(batch[num_left_to_skip:])
        num_left_to_skip = max(0, num_left_to_skip - len(batch))
    return [batch for batch in remaining_batches if batch], remaining_frames


def assert_report(report, counts, bad_rows, num_pending):
    actual = (report.rows, report.frames, report.stale, report.steps, report.truncated, report.pending)
    assert actual == (*(counts[name] for name in ("rows", "frames", "stale", "steps", "truncated")), num_pending)
    assert report.dropped == dict(oracle.Counter(bad_row.reason for bad_row in bad_rows))


def position_of(batches, row):
    """Return (batch, row in the batch) of a row that is counted over all batches."""
    for number, batch in enumerate(batches):
        if row < len(batch):
            return number, row
        row -= len(batch)
    raise AssertionError(row)


def assert_quarantine(path, batches, bad_rows):
    steps = [example.step for batch in batches for example in batch]
    rows = rows_of(path)
    actual = [(row["batch"], row["row_index"], row["table"], row["origin_step"], row["reason"]) for row in rows]
    expected = [(*position_of(batches, entry.row), entry.table, steps[entry.row], entry.reason) for entry in bad_rows]
    assert actual == expected
    for row, entry in zip(rows, bad_rows, strict=True):
        assert row["id"] == (None if entry.id is None or entry.id >= 2**63 else entry.id)
        assert row["id_text"] == (str(entry.id) if entry.id is not None and entry.id >= 2**63 else None)
        assert (row["gradient"] is None) == (entry.gradient is None)
        if entry.gradient is not None:
            np.testing.assert_array_equal(row["gradient"], entry.gradient)


def assert_error(error, batches, bad_rows):
    """Assert that the message names one of the frame's bad rows, with its position, its feature and its reason."""
    match = re.search(r"batch (\d+), row (\d+), column '(\w+)'.*\[(\w+)\]", str(error))
    assert match, error
    reported_row = int(match[1]), int(match[2]), match[3], match[4]
    assert reported_row in [(*position_of(batches, entry.row), entry.feature, entry.reason) for entry in bad_rows]


def source_of(batches, kind, folder):
    """Return the batches themselves, the path of an Arrow IPC file with them, or the bytes of an Arrow IPC stream."""
    if kind == "batches":
        return batches
    if kind == "bytes":
        return io.BytesIO(stream(list(batches)))
    path = folder / "log.arrow"
    path.write_bytes(stream(list(batches), make=pa.ipc.new_file))
    return path


def changed_rows(reader):
    return [(row["table"], row["step"], row["id"], row["row"]) for batch in reader for row in batch.to_pylist()]


@pytest.mark.promise("A stream of examples has the bits of its gradient rows")
@examples(500, 40, report_multiple_bugs=False)
@given(st.data())
def test_random_streams_give_the_oracles_report_state_and_quarantine(mesh_of, tmp_path_factory, data):
    configuration = data.draw(configurations())
    stream = data.draw(streams(configuration, data.draw(st.booleans())))
    mode = data.draw(st.sampled_from(["drop", "quarantine"]))
    flush = data.draw(st.booleans())
    mesh = mesh_of(data.draw(st.sampled_from([1, 3])))
    engine = configuration.engine(mesh=mesh, threads=data.draw(st.integers(1, 2)))
    oracle_engine = configuration.oracle()
    folder = tmp_path_factory.mktemp("bad")
    for number, (batches, frames) in enumerate(zip(stream.parts, stream.cut, strict=True)):
        counts, bad_rows = oracle_engine.run(frames, True, stream.call_rates, flush)
        path = folder / f"{number}.arrows"
        on_bad_row = f"quarantine={path}" if mode == "quarantine" else mode
        source = source_of(stream.arrow(batches), data.draw(st.sampled_from(["batches", "file", "bytes"])), folder)
        report = engine.run(source, on_bad_row=on_bad_row, flush=flush, **stream.options)
        assert_report(report, counts, bad_rows, len(oracle_engine.accumulated))
        assert_same_state(engine, oracle_engine)
        if mode == "quarantine":
            assert_quarantine(path, batches, bad_rows)


@examples(100, 15, report_multiple_bugs=False)
@given(st.data())
def test_random_streams_apply_the_frames_before_and_after_a_frame_with_bad_rows(data):
    """A run applies the frames before the bad one, and the next run continues with the frames after it."""
    configuration = data.draw(configurations())
    stream = data.draw(streams(configuration, data.draw(st.booleans())))
    engine, oracle_engine = configuration.engine(), configuration.oracle()
    for batches, frames in zip(stream.parts, stream.cut, strict=True):
        while True:
            try:
                oracle_engine.run(frames, False, stream.call_rates)
            except oracle.BadFrameError as bad_frame:
                with pytest.raises(ps.InputError) as error_info:
                    engine.run(stream.arrow(batches), **stream.options)
                assert_error(error_info.value, batches, bad_frame.rows)
                assert_same_state(engine, oracle_engine)
                batches, frames = remaining_source(batches, frames, bad_frame.frame)
            else:
                engine.run(stream.arrow(batches), **stream.options)
                assert_same_state(engine, oracle_engine)
                break


@examples(50, 10, report_multiple_bugs=False)
@given(st.data())
def test_random_streams_give_the_rows_that_each_step_changed(data):
    configuration = data.draw(configurations())
    stream = data.draw(streams(configuration, False))
    engine, oracle_engine = configuration.engine(), configuration.oracle()
    for batches, frames in zip(stream.parts, stream.cut, strict=True):
        oracle_engine.deltas.clear()
        oracle_engine.run(frames, True, stream.call_rates)
        reader = engine.stage(stream.arrow(batches), on_bad_row="drop", **stream.options)
        assert changed_rows(reader) == oracle_engine.deltas
        assert_same_state(engine, oracle_engine)


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_thousands_of_lookups_give_the_oracles_state(mesh_of, seed):
    """The stream has more rows than one thread gets at a time, and ids that hundreds of examples share."""
    draws = np.random.default_rng(seed)
    tables = [
        DrawnTable("wide", 300, 33, "sqrtn", "adagrad", 0.1, None),
        DrawnTable("narrow", 40, 5, "mean", "momentum", 0.5, None),
    ]
    features = [
        lookup_oracle.Feature("f0", "wide", "sqrtn"),
        lookup_oracle.Feature("f1", "wide", "sqrtn", 3),
        lookup_oracle.Feature("f2", "narrow", "mean"),
        lookup_oracle.Feature("f3", "wide", "sqrtn"),
    ]
    configuration = Drawn(tables, features, 2, "mean", False)
    rows = []
    for number in range(600):
        lookups = {}
        for feature in features:
            table = configuration.table(feature.table)
            ids = draws.integers(table.rows, size=draws.integers(8)).tolist()
            weights = draws.normal(size=len(ids)).tolist() if feature.name in ("f2", "f3") else None
            gradient = draws.normal(size=table.dim * max(feature.length, 1)).tolist()
            lookups[feature.name] = lookup_oracle.Looked(ids, weights, gradient)
        rows.append(oracle.Example(lookups, number // 100))
    batches = [rows[:250], [], rows[250:]]
    widths = {feature.name: configuration.table(feature.table).dim * max(feature.length, 1) for feature in features}
    fields = [("ids", pa.list_(pa.int32())), ("weights", pa.list_(pa.float32()))]
    types = {name: pa.struct([*fields, ("gradient", pa.list_(pa.float32(), widths[name]))]) for name in ("f2", "f3")}
    types |= {name: pa.struct([fields[0], ("gradient", pa.list_(pa.float32(), widths[name]))]) for name in ("f0", "f1")}
    stream = Stream([batches], types, True, False, None, None, {}, [oracle.split_frames(batches)])
    oracle_engine = configuration.oracle()
    oracle_engine.run(stream.cut[0])
    for devices, threads in ((1, 1), (1, 4), (3, 2)):
        engine = configuration.engine(mesh=mesh_of(devices), threads=threads)
        engine.run(stream.arrow(batches))
        assert_same_state(engine, oracle_engine)
