"""The times of frames, which only ages need: read where they are named, and without an effect on any row."""

import pyarrow as pa
import pytest
from batches import batch

import penstock as ps
from penstock.checkpoint.store import Folder

NAMED = {"time": "ts"}


def config_of(dynamic=None):
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=dynamic)
    return ps.EmbeddingConfig.from_tables([table])


def engine_of(**arguments):
    return ps.Engine(config_of(), **arguments)


def timed(*times):
    return [batch([step % 8, 3], step=step, ts=time) for step, time in enumerate(times)]


def contents(folder):
    return Folder(folder).newest().contents


def test_a_column_of_times_is_read_where_it_is_named_and_changes_no_bit(tmp_path):
    named, unnamed = engine_of(), engine_of()
    named.run(timed(100, 130, 120), columns=NAMED, checkpoint=tmp_path / "named")
    unnamed.run(timed(100, 130, 120), checkpoint=tmp_path / "unnamed")
    assert named.state_hash() == unnamed.state_hash()
    assert contents(tmp_path / "named")["pipeline"] == {**contents(tmp_path / "unnamed")["pipeline"], "time": 130}
    assert "time" not in contents(tmp_path / "unnamed")["pipeline"]


def test_a_column_with_the_default_name_is_not_read_unless_it_is_named():
    texts = batch([1], step=0, time="noon")
    engine_of().run([texts])
    with pytest.raises(ps.InputError, match=r"column 'time': expected an integer \(int64\), seconds, got string"):
        engine_of().run([texts], columns={"time": "time"})


@pytest.mark.parametrize(
    ("ts", "message"),
    [
        (None, "no column 'ts' for the role 'time'"),
        (pa.array([5, None]), "row 1, column 'ts': expected seconds from 0 to 4294967294, constant within a frame"),
        (pa.array([5, 6]), "row 1, column 'ts': the time changes inside a frame: 5, then 6"),
        (1_700_000_000_000, "these may be milliseconds: divide by 1000"),
    ],
)
def test_a_time_that_is_named_and_not_there_is_an_error(ts, message):
    engine = engine_of()
    with pytest.raises(ps.InputError, match=message):
        engine.run([batch([1, 2], step=0, ts=ts)], columns=NAMED)
    assert engine.global_step == 0


def test_a_readers_age_is_that_of_the_newest_frame_in_the_rows(tmp_path, monkeypatch):
    now = [1_000.5]
    monkeypatch.setattr("penstock.core.freshness.now_s", lambda: now[0])
    engine = engine_of(num_required=2, shared=tmp_path / "shared")
    engine.publish()
    frame = {"user": ([5], [[1.0, 2.0]])}
    with ps.Reader(tmp_path / "shared") as reader:
        assert (reader.frame_time, reader.age_s) == (None, None)
        engine.apply(frame, time=990)
        assert reader.age_s is None  # no step has it
        engine.apply(frame, time=900)
        assert (reader.version.step, reader.frame_time, reader.age_s) == (1, 990, 10.5)
        engine.apply(frame, time=1_100)
        now[0] = 1_020
        assert reader.age_s == 30
        engine.flush()
        assert reader.age_s == 0  # it is in the future


def test_a_resumed_run_shows_the_age_of_the_rows_in_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.core.freshness.now_s", lambda: 1_000.0)
    engine_of().run(timed(100, 130), columns=NAMED, checkpoint=tmp_path / "c")
    resumed = ps.Engine.restore(tmp_path / "c", shared=tmp_path / "shared")
    resumed.publish()
    with ps.Reader(tmp_path / "shared") as reader:
        assert reader.age_s == 870
        resumed.run(timed(100, 130, 400), columns=NAMED, checkpoint=tmp_path / "c", resume=True)
        assert reader.age_s == 600
        resumed.save(tmp_path / "c")
        resumed.apply({"user": ([5], [[1.0, 2.0]])}, time=990)
        assert reader.age_s == 10
        resumed.rollback(3)
        assert reader.age_s == 600
    gated = engine_of(num_required=2)
    gated.run(timed(100, 130, 400), columns=NAMED, checkpoint=tmp_path / "gated")
    other = ps.Engine.restore(tmp_path / "gated", shared=tmp_path / "other")
    other.publish()
    with ps.Reader(tmp_path / "other") as reader:
        assert reader.age_s is None  # a frame that no step has applied may be the newest one
