"""The clock of a dynamic table as the time of frames: of streams, of arrays, of examples and of producers."""

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
        ([5, 1_700_000_000_000], "got 1700000000000; these may be milliseconds: divide by 1000"),
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
    with pytest.raises(ps.InputError, match="no column 'time' for the role 'time'"):
        engine_of(HOURLY).run([batch])


def test_a_column_time_is_ignored_where_no_clock_needs_it():
    batch = timed([1], [5]).set_column(3, "time", pa.array(["noon"]))
    engine = engine_of()
    engine.run([batch])
    assert engine.keys("user").to_pylist() == [1]
