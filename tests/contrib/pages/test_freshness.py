"""``penstock_freshness_seconds``: how old frames are at their row, delta and commit."""

import json

import numpy as np
import pytest
from batches import batch
from ipc import write
from scrapes import parsed
from services import client_of, frame, service_of

import penstock as ps
from penstock.metrics import Metrics

NAME, NAMED = "penstock_freshness_seconds", {"time": "ts"}


@pytest.fixture
def clock(monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr("penstock.core.freshness.now_s", lambda: now[0])
    return now


def engine_of(**arguments):
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    return ps.Engine(ps.EmbeddingConfig.from_tables([table]), **arguments)


def ages(engine, until):
    """The quantiles 0.5, 0.95 and 0.99, the number of frames and the sum of their ages."""
    values = parsed(Metrics(engine).text())
    quantiles = [values[f'{NAME}{{quantile="{share}",until="{until}"}}'] for share in ("0.5", "0.95", "0.99")]
    return [*quantiles, values[f'{NAME}_count{{until="{until}"}}'], values[f'{NAME}_sum{{until="{until}"}}']]


def test_a_run_says_how_old_frames_are_at_their_row_delta_and_commit(tmp_path, clock):
    engine = engine_of()

    def pass_time(*_):  # after each frame
        clock[0] += 10

    log = [batch([1, 2], step=step, ts=997 + 10 * step) for step in range(10)]
    options = {"checkpoint": tmp_path / "c", "deltas": tmp_path / "deltas.arrows", "per_steps": 2}
    engine.run(log, columns=NAMED, progress=pass_time, **options)
    assert ages(engine, "row") == [3, 3, 3, 10, 30]
    assert ages(engine, "delta") == [3, 13, 13, 10, 80]
    assert ages(engine, "commit") == [53, 103, 103, 10, 580]
    assert Metrics(engine).plain()[NAME]["commit,0.99"] == 103


def test_a_service_says_how_old_frames_are_when_followers_get_them(tmp_path, clock):
    engine = ps.Engine(config_of_service())
    with service_of(engine, tmp_path / "c", columns=NAMED) as service, client_of(service) as client:
        client.put([frame(number, ts=990) for number in range(3)], "w0")
        for until in ("row", "delta", "commit"):
            assert ages(engine, until) == [10, 10, 10, 3, 30]
        assert "frame_times" in client.status()


def config_of_service():
    return ps.EmbeddingConfig.from_tables([ps.TableConfig(500, 4, name="user", optimizer=ps.SGD(0.1))])


def test_a_service_without_a_checkpoint_counts_the_deltas_that_a_reader_has_asked_for(clock):
    engine = ps.Engine(config_of_service())
    with service_of(engine, columns=NAMED) as service, client_of(service) as client:
        version = client.table("user").version
        client.put([frame(0, ts=990)], "w0")
        clock[0] = 1_030
        assert [delta.version.step for delta in client.deltas(version)] == [1]
        assert (ages(engine, "row"), ages(engine, "delta")) == ([10, 10, 10, 1, 10], [40, 40, 40, 1, 40])


def test_frames_count_at_the_step_that_takes_them_and_a_rollback_drops_the_others(tmp_path, clock):
    engine = engine_of(num_required=2)
    frame = {"user": ([5], [[1.0, 2.0]])}
    for time in (995, 2_000):  # the second one is in the future
        engine.apply(frame, time=time)
    assert ages(engine, "row") == [0, 5, 5, 2, 5]
    engine.save(tmp_path / "c")
    engine.apply(frame, time=500)
    assert ages(engine, "row") == [0, 5, 5, 2, 5]
    engine.rollback(1)
    engine.apply(frame)
    engine.apply(frame)
    assert ages(engine, "row") == [0, 5, 5, 2, 5]
    engine.save(tmp_path / "c")
    assert ages(engine, "commit") == [0, 5, 5, 2, 5]


def test_a_replay_writes_the_ages_to_its_file_of_metrics(tmp_path, clock, call):
    config_of_service().save(tmp_path / "tables.pbtxt")
    log = write(tmp_path / "log.arrows", [frame(number, step=number, ts=990 - number) for number in range(4)])
    flags = ["--column", "time=ts", "--metrics-file", tmp_path / "metrics.jsonl"]
    call(0, "replay", tmp_path / "tables.pbtxt", log, *flags)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last[NAME] == {"row,0.5": 11, "row,0.95": 13, "row,0.99": 13}


def test_frames_without_a_time_have_no_age():
    engine = engine_of()
    engine.run([batch([1, 2], step=step, time=5) for step in range(3)])
    assert [name for name in parsed(Metrics(engine).text()) if name.startswith(NAME)] == []


def test_times_of_years_take_little_memory_and_every_frame_counts(tmp_path, clock):
    clock[0] = 10_000_000.0
    engine, rng = engine_of(), np.random.default_rng(0)
    times = rng.integers(0, 10_000_000, 5_000)
    log = [batch([1], step=step, ts=int(time)) for step, time in enumerate(times)]
    engine.run(log, columns=NAMED, checkpoint=tmp_path / "c")
    median, most, _, count, _ = ages(engine, "commit")
    assert count == 5_000
    exact = np.quantile(10_000_000.0 - times, [0.5, 0.95])
    np.testing.assert_allclose([median, most], exact, rtol=0.02)
    assert len(engine.core.freshness.ages["commit"].recent) <= 1_024
