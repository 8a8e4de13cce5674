"""How old what a service, its followers and their readers have is, by the newest frame's time."""

import pytest
from cli import outcome
from limits import HANG_S
from services import LOOPBACK, client_of, config_of, frame, service_of
from stores import Shared

import penstock as ps
from penstock.cli import main
from penstock.serving.followers.follower import Follower
from penstock.serving.service.replica import ReplicaService

NAMED = {"time": "ts"}


@pytest.fixture
def clock(monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr("penstock.core.freshness.now_s", lambda: now[0])
    return now


def follow(service, target):
    """Follow once. Returns the progress."""
    follower = Follower(client_of(service), target, patience_s=0.1, interval_s=0.01)
    follower.run(once=True)
    follower.target.close()
    return follower.progress


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_follower_says_how_old_its_target_is_and_readers_of_the_target_too(is_durable, tmp_path, clock, capsys):
    store = Shared(tmp_path)
    folder = tmp_path / "c" if is_durable else None
    with service_of(folder=folder, columns=NAMED) as service, client_of(service) as client:
        assert follow(service, store.open_target()).age_s is None
        assert (ps.Reader(store.path).age_s, client.status().frame_times) == (None, {})
        for number, now in enumerate((1_000.0, 1_030.0, 1_060.0)):
            clock[0] = now
            client.put([frame(number, ts=int(now) - 12)], "w0")  # returns once they are durable
            progress = follow(service, store.open_target())
            assert (progress.step, progress.frame_time, progress.age_s) == (number + 1, int(now) - 12, 12)
            reader = ps.Reader(store.path)
            assert (reader.version.step, reader.age_s) == (number + 1, 12)
        clock[0] = 1_100
        assert (reader.age_s, follow(service, store.open_target()).age_s) == (52, 52)
        stages = ("row", "delta", "commit") if is_durable else ("row", "delta")
        _, status, _ = outcome(capsys, "status", service.address.uri)
        assert status["frame_times"] == dict.fromkeys(stages, 1_048)
        assert status["age_s"] == dict.fromkeys(stages, 52)
        assert main(["status", service.address.uri]) == 0
        assert f"age       {', '.join(f'{stage} 0:52' for stage in stages)}\n" in capsys.readouterr().out


def test_rows_that_no_commit_has_are_younger_than_what_followers_get(tmp_path, clock):
    store = Shared(tmp_path)
    engine = ps.Engine(config_of(), num_required=2)
    with service_of(engine, tmp_path / "c", every=100, columns=NAMED) as service, client_of(service) as client:
        client.put([frame(0, ts=900), frame(1, ts=910)], "w0")
        assert follow(service, store.open_target()).age_s == 90
        with engine.gate.still():  # neither a commit nor its delta is published meanwhile
            engine.apply({"user": ([1], [[1.0] * 4])}, time=950)
            engine.apply({"user": ([1], [[1.0] * 4])}, time=940)
        assert service.status()["frame_times"] == {"row": 950, "delta": 910, "commit": 910}
        assert follow(service, store.open_target()).age_s == 90
        client.put([frame(2, ts=955), frame(3, ts=960)], "w1")
        assert service.status()["frame_times"] == dict.fromkeys(("row", "delta", "commit"), 960)
        assert follow(service, store.open_target()).age_s == 40


def test_follow_into_a_function_reports_the_age(tmp_path, clock, capsys):
    with service_of(columns=NAMED) as service, client_of(service) as client:
        client.put([frame(0, ts=900)], "w0")
        words = ["follow", service.address.uri, "--into", "function_rows:update", "--once"]
        code, report, _ = outcome(capsys, *words, "--state", tmp_path / "a")
        assert (code, report["step"], report["frame_time"], report["age_s"]) == (0, 1, 900, 100)
        assert main([*map(str, words), "--state", str(tmp_path / "b")]) == 0
        assert "age       1:40 since the time of the newest frame\n" in capsys.readouterr().out
    with service_of() as service:
        words[1] = service.address.uri
        assert outcome(capsys, *words, "--state", tmp_path / "c")[1]["age_s"] is None


def test_a_replica_says_how_old_its_rows_are(tmp_path, clock, capsys):
    store = Shared(tmp_path)
    with service_of(columns=NAMED) as service, client_of(service) as client:
        client.put([frame(0, ts=900)], "w0")
        follow(service, store.open_target())
    with ps.Reader(store.path) as reader:
        replica = ReplicaService(reader, LOOPBACK)
        try:
            _, status, _ = outcome(capsys, "status", replica.address.uri)
            assert (status["frame_times"], status["age_s"]) == ({"row": 900}, {"row": 100})
        finally:
            assert replica.close(HANG_S)


def test_a_service_that_starts_again_knows_how_old_its_rows_are_and_the_log_of_a_follower_says_it(
    tmp_path, clock, caplog
):
    store, folder = Shared(tmp_path), tmp_path / "c"
    caplog.set_level("DEBUG", "penstock")
    with service_of(folder=folder, columns=NAMED) as service, client_of(service) as client:
        client.put([frame(0, ts=900)], "w0")
        follow(service, store.open_target())
        client.put([frame(1, ts=920)], "w0")
        follow(service, store.open_target())
    events = [record.penstock for record in caplog.records if hasattr(record, "penstock")]
    found = [(each["event"], each["age_s"]) for each in events if "age_s" in each]
    assert found == [("filled", 100), ("applied", 80)]
    engine = ps.Engine.restore(folder)
    with service_of(engine, folder, resume=True, columns=NAMED) as service, client_of(service) as client:
        assert client.status().frame_times == dict.fromkeys(("row", "delta", "commit"), 920)
        assert follow(service, store.open_target()).age_s == 80
