"""The clock of a dynamic table as the time of frames: of streams, of arrays, of examples and of producers."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from dynamic import engine_of, timed

import penstock as ps

HOURLY = ps.Dynamic(expire_after=3600, clock="time")


def test_time_is_the_largest_of_any_frame():
    engine = engine_of(HOURLY)
    engine.run([timed([1, 2, 3], [10_000, 6_000, 10_000])])
    assert engine.records("user", [1, 2, 3])["last"].tolist() == [10_000, 10_000, 10_000]
    engine.run([timed([4], [13_600], [3])])
    assert engine.keys("user").to_pylist() == [1, 2, 3, 4]
    engine.run([timed([2], [13_601], [4])])
    assert engine.keys("user").to_pylist() == [2, 4]
    assert engine.explain("user", 2) == "present; last at time 13601"


def test_the_time_of_frames_in_the_gate_is_committed(tmp_path):
    log = timed([1, 2, 3, 4, 1, 5], [50, 9_000, 40, 60, 9_100, 12_700])
    whole = engine_of(HOURLY, num_required=2)
    whole.run([log.slice(0)], merge="step")
    for limit in range(1, 6):
        folder = tmp_path / str(limit)
        engine_of(HOURLY, num_required=2).run([log], checkpoint=folder, limit=limit)
        again = ps.Engine.restore(folder)
        again.run([log], checkpoint=folder, resume=True)
        assert again.state_hash() == whole.state_hash()


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([5, None], "row 1, column 'time': expected seconds from 0 to 4294967294, constant within a frame, got null"),
        ([5, -1], "row 1, column 'time': expected seconds from 0 to 4294967294, constant within a frame, got -1"),
        ([5, 6], "row 1, column 'time': the time changes inside a frame: 5, then 6"),
    ],
)
def test_bad_times_are_errors_that_name_the_row(times, message):
    engine = engine_of(HOURLY)
    with pytest.raises(ps.InputError) as error:
        engine.run([timed([1, 2], times, [0, 0])])
    assert message in str(error.value)
    assert (engine.global_step, len(engine.keys("user"))) == (0, 0)


def test_a_stream_without_time_is_refused_where_a_clock_needs_it():
    batch = timed([1], [5]).drop_columns(["time"])
    with pytest.raises(ps.InputError, match="no column for the role 'time'"):
        engine_of(HOURLY).run([batch])


def test_a_column_time_is_ignored_where_no_clock_needs_it():
    batch = timed([1], [5]).set_column(3, "time", pa.array(["noon"]))
    engine = engine_of()
    engine.run([batch])
    assert engine.keys("user").to_pylist() == [1]


def test_eviction_has_the_clock_of_the_frames_without_an_expiry_too():
    log, counted = timed([1, 1, 1, 2, 3], [0, 0, 0, 1000, 1000]), ps.Dynamic(evict="lfu", half_life=100)
    for clock, left in (("steps", [1, 3]), ("time", [2, 3])):
        engine = engine_of(dataclasses.replace(counted, clock=clock), rows=2)
        engine.run([log])
        assert engine.keys("user").to_pylist() == left


def test_a_stale_frame_does_not_move_the_clock():
    engine = engine_of(HOURLY)
    engine.run([timed([1, 2], [10_000, 20_000], [0, -1])])
    assert engine.records("user", [1, 2])["last"].tolist() == [10_000, -1]
    assert engine.keys("user").to_pylist() == [1]


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (2**32 - 1, "milliseconds: divide by 1000"),
        (1_700_000_000_000, "milliseconds: divide by 1000"),
        (1_700_000_000_000_000, "microseconds: divide by 1000000"),
        (1_700_000_000_000_000_000, "nanoseconds: divide by 1000000000"),
    ],
)
def test_a_time_of_another_unit_is_suggested(value, unit):
    engine = engine_of(HOURLY)
    for push_it in (
        lambda: engine.run([timed([1], [value])]),
        lambda: engine.apply({"user": ([1], np.ones((1, 4), np.float32))}, time=value),
    ):
        with pytest.raises(ps.InputError, match=f"got {value}; these may be {unit}"):
            push_it()
    engine.run([timed([1], [2**32 - 2])])
    assert engine.records("user", [1])["last"].tolist() == [2**32 - 2]


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.float64(), pa.utf8()])
def test_a_column_of_another_type_is_refused(kind):
    values = {pa.utf8(): ["5"], pa.float64(): [5.0]}.get(kind, [5])
    batch = timed([1], [5]).set_column(3, "time", pa.array(values, kind))
    with pytest.raises(ps.InputError, match=r"column 'time': expected an integer \(int64\), seconds, got"):
        engine_of(HOURLY).run([batch])


def test_arrays_take_the_time_as_an_argument():
    engine = engine_of(HOURLY)
    frame = {"user": (np.array([1]), np.ones((1, 4), np.float32))}
    engine.apply(frame, time=100)
    engine.apply(frame, time=np.int64(250))
    assert engine.explain("user", 1) == "present; last at time 250"
    with pytest.raises(ps.InputError, match="expected time=, in seconds: the clock of a dynamic table"):
        engine.apply(frame)
    with pytest.raises(ps.InputError, match=r"expected time=, an integer, in seconds, got 2\.5"):
        engine.apply(frame, time=2.5)
    with pytest.raises(ps.InputError, match=r"expected time=, an integer, in seconds, got True"):
        engine.apply(frame, time=True)
    with pytest.raises(ps.InputError, match="expected seconds from 0 to 4294967294, constant within a frame, got -1"):
        engine.apply(frame, time=-1)
    assert (engine.global_step, engine.explain("user", 1)) == (2, "present; last at time 250")


def test_a_time_that_no_clock_needs_changes_nothing():
    with_time, without = engine_of(), engine_of()
    frame = {"user": (np.array([1]), np.ones((1, 4), np.float32))}
    with_time.apply(frame, time=100)
    without.apply(frame)
    assert with_time.state_hash() == without.state_hash()
    assert with_time.explain("user", 1) == "present; last at step 0"


def test_the_time_survives_the_search_for_a_bad_row():
    engine = engine_of(HOURLY, num_required=2)
    first = np.ones((1, 4), np.float32)
    engine.apply({"user": (np.array([1]), first)}, time=100)
    bad = {"user": (np.array([2, 3]), np.array([[np.nan] * 4, [1.0] * 4], np.float32))}
    with pytest.raises(ps.InputError, match="finite"):
        engine.apply(bad, time=9_000)
    engine.apply({"user": (np.array([2]), first)}, time=200)
    assert engine.records("user", [1, 2])["last"].tolist() == [200, 200]
    log = timed([4, 5], [300, 300], [1, 1]).set_column(1, "gradient", pa.array([[np.nan] * 4, [1.0] * 4]))
    engine.run([log], on_bad_row="drop", flush=True)
    assert engine.records("user", [4, 5])["last"].tolist() == [-1, 300]


def features_of(dynamic):
    table = ps.TableConfig(8, 4, name="user", dynamic=dynamic, combiner="sum")
    features = {"f": ps.FeatureConfig(table, name="f")}
    return ps.Engine(ps.EmbeddingConfig.from_features(features, batch_size=2, optimizer=ps.SGD(1.0)))


def test_example_streams_carry_the_time():
    engine = features_of(HOURLY)
    columns = {
        "f": pa.array([{"ids": [1, 2], "gradient": [1.0] * 4}, {"ids": [2], "gradient": [1.0] * 4}]),
        "step": pa.array([0, 1]),
        "time": pa.array([100, 3_701]),
    }
    engine.run([pa.record_batch(columns)])
    assert engine.keys("user").to_pylist() == [2]
    assert engine.explain("user", 2) == "present; last at time 3701"
    with pytest.raises(ps.InputError, match="the clock of a dynamic table needs 'time'"):
        engine.run([pa.record_batch({name: columns[name] for name in ("f", "step")})])
    for times, message in (
        ([2, None], "row 1, column 'time': expected seconds from 0 to 4294967294, constant within a frame, got null"),
        ([2, 3], "row 1, column 'time': the time changes inside a frame: 2, then 3"),
        ([2.0, 3.0], r"column 'time': expected an integer \(int64\), seconds, got double"),
    ):
        with pytest.raises(ps.InputError, match=message):
            engine.run([pa.record_batch({"f": columns["f"], "time": pa.array(times)})])
    ignoring = features_of(ps.Dynamic())
    ignoring.run([pa.record_batch({**columns, "time": pa.array(["a", "b"])})])
    assert ignoring.keys("user").to_pylist() == [1, 2]


def test_gradients_of_activations_carry_the_time():
    engine = features_of(HOURLY)
    _, data = engine.recv_activations({"f": np.array([7, 8])})
    gradients = {"f": np.ones((2, 4), np.float32)}
    with pytest.raises(ps.InputError, match=r"send_gradients\(\): expected time=, in seconds"):
        engine.send_gradients(gradients, deduplication_data=data)
    engine.send_gradients(gradients, deduplication_data=data, time=60)
    assert engine.records("user", [7, 8])["last"].tolist() == [60, 60]


def test_two_tables_may_have_different_clocks():
    tables = [
        ps.TableConfig(8, 4, name="user", optimizer=ps.SGD(1.0), dynamic=HOURLY),
        ps.TableConfig(8, 4, name="item", optimizer=ps.SGD(1.0), dynamic=ps.Dynamic(expire_after=1)),
    ]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    frame = (np.array([1]), np.ones((1, 4), np.float32))
    engine.apply({"user": frame, "item": frame}, time=50)
    for _ in range(2):
        engine.apply({"user": (np.array([2]), frame[1])}, time=51)
    assert engine.keys("user").to_pylist() == [1, 2]
    assert engine.keys("item").to_pylist() == []
