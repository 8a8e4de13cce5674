"""Rounds of a service: who waits for whom, how far a worker may be ahead, and what ends a wait."""

import json
import signal
import threading

import numpy as np
import pyarrow as pa
import pytest
from limits import HANG_S, until
from round_kills import free_port, run_case
from services import Process, client_of, config_of, frame, service_of

import penstock as ps
from penstock.cli.main import main
from penstock.serving.flight import connect

STEPS = 12


def engine_of(workers=2):
    return ps.Engine(config_of(), workers=workers, reduction="sum")


def frames_of(worker, steps=STEPS):
    return [frame(number, step=number, seed=worker) for number in range(steps)]


def send(service, worker, frames, name="rank-{}"):
    with client_of(service) as client, client.producer(name.format(worker)) as producer:
        for number, each in enumerate(frames, 1):
            if number > producer.last:
                producer.send(each)


def in_background(*arguments):
    thread = threading.Thread(target=send, args=arguments)
    thread.start()
    return thread


def of_replay(workers=2):
    """The state hash of a replay of the workers' logs."""
    engine = engine_of(workers)
    engine.run([pa.Table.from_batches(frames_of(worker)) for worker in range(workers)])
    assert engine.global_step == STEPS
    return engine.state_hash()


@pytest.mark.parametrize("first", [0, 1])
def test_a_live_job_has_the_hash_of_a_replay_of_its_logs_whoever_is_first(first):
    with service_of(engine_of()) as service, client_of(service) as client:
        early = in_background(service, first, frames_of(first))
        until(lambda: client.status()["rounds"]["missing"] == [f"rank-{1 - first}"])
        until(lambda: sum(client.status()["rounds"]["early"].values()) == 2)  # and no more are read
        status = client.status()
        assert status["pending"] == status["frames"] == 2 + (first == 0)
        assert status["num_required"] == 2
        send(service, 1 - first, frames_of(1 - first))
        early.join()
        assert client.status()["rounds"]["missing"] == []
        assert service.engine.state_hash() == of_replay()


def test_waits_name_the_workers_that_are_missing(capsys):
    with service_of(engine_of(3)) as service, client_of(service) as client:
        send(service, 1, frames_of(1, 1))
        explained = client.connection.act("explain")
        assert explained["missing"] == ["rank-0", "rank-2"]
        assert explained["frames"] == {"rank-1": 1}
        assert "waits for rank-0, rank-2" in explained["gate"]
        assert client.connection.act("position", contributor="rank-1")["in_gate"] == 1
        main(["status", service.address.uri])
        assert "rounds    3 workers, waits for rank-0, rank-2, for " in capsys.readouterr().out
        send(service, 0, frames_of(0, 1))
        assert client.connection.act("explain")["missing"] == ["rank-2"]


def test_a_newer_stream_of_a_worker_and_the_end_of_the_service_end_its_wait(tmp_path):
    with service_of(engine_of(), tmp_path, every=1) as service, client_of(service) as client:
        before = client.producer("rank-0")
        for each in frames_of(0):
            before.send(each)
        until(lambda: client.status()["rounds"]["early"] == {"rank-0": 2})
        with client_of(service) as other:
            newer = other.producer("rank-0", first=1)
            newer.send(frames_of(0)[0])
            until(lambda: newer.poll().position == 3)
        with pytest.raises(ps.UsageError, match="another stream of producer 'rank-0' has begun"):
            before.wait()
    resumed = ps.Engine.restore(tmp_path)
    assert resumed.gate.num_accumulated == 3
    with service_of(resumed, tmp_path, resume=True) as service:
        threads = [in_background(service, worker, frames_of(worker)) for worker in range(2)]
        for thread in threads:
            thread.join()
        assert service.engine.state_hash() == of_replay()


def test_a_rollback_lets_workers_go_on_that_wait(tmp_path):
    with service_of(engine_of(), tmp_path, every=1) as service, client_of(service) as client:
        client.checkpoint()
        early = in_background(service, 1, [frame(n, step=None, seed=1) for n in range(STEPS)])
        until(lambda: client.status()["rounds"]["early"] == {"rank-1": 2})
        client.rollback(0)
        until(lambda: client.status()["frames"] == 4)
        status = client.status()
        assert (status["rolled_back"], status["pending"]) == (2, 2)
        send(service, 0, [frame(n, step=None, seed=0) for n in range(STEPS - 2)])
        early.join()
        assert client.status()["rounds"]["missing"] == []


def test_a_worker_without_rows_has_its_turn_all_the_same():
    with service_of(engine_of()) as service, client_of(service) as client:
        send(service, 0, frames_of(0, 2))
        with client.producer("rank-1") as producer:
            producer.send(frames_of(1)[0].slice(0, 0), step=0)
            with pytest.raises(ps.InputError, match="expected a frame without rows, whose step is given"):
                producer.send(frames_of(1)[1], step=1)
            with pytest.raises(ps.InputError, match="expected a frame: a record batch or table with rows"):
                producer.send(frames_of(1)[1].slice(0, 0))
            producer.send(frames_of(1)[1])
        alone = engine_of(["rank-0"])
        alone.run(pa.Table.from_batches([frames_of(0)[0]]))
        joined = pa.Table.from_batches([frames_of(0)[1], frames_of(1)[1]])
        alone.run(joined)
        assert service.engine.state_hash() == alone.state_hash()


def test_frames_of_somebody_else_are_refused_and_change_nothing():
    with service_of(engine_of()) as service:
        with pytest.raises(ps.InputError, match=r"one of the workers \(rank-0, rank-1\), got one of 'rank-7'"):
            send(service, 7, frames_of(7, 1))
        assert service.engine.gate.num_accumulated == 0


def test_a_wait_beyond_the_limit_ends_the_service_with_the_names(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    words = [tmp_path / "c.pbtxt", "--workers", "a,b", "--round-timeout", "0.2", "--checkpoint", tmp_path / "run"]
    with Process(*words) as service, connect(service.uri, patience_s=HANG_S) as client:
        with client.producer("b") as producer:
            producer.send(frame(0, step=0))
        code, _, err = service.wait()
    assert code == 6
    assert "step 0 has waited for a for" in err
    assert "--round-timeout 0.2" in err
    assert ps.Engine.restore(tmp_path / "run").gate.num_accumulated == 1


def test_a_round_may_open_without_a_worker_that_is_missing_and_says_so(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    words = [tmp_path / "c.pbtxt", "--workers", 2, "--round-timeout", "0.2", "--on-missing", "skip", "--json"]
    with Process(*words) as service:
        with connect(service.uri, patience_s=HANG_S) as client:
            with client.producer("rank-1") as producer:
                for number in range(2):
                    producer.send(frame(number, step=number, seed=1))
            until(lambda: client.status()["global_step"] == 2)
            with client.producer("rank-0") as producer:
                producer.send(frame(0, step=0))
            status = client.status()
            assert (status["stale"], status["rounds"]["skipped"]) == (1, 2)
        code, out, err = service.end(signal.SIGTERM)
    assert code == 0
    assert json.loads(out)["rounds"]["skipped"] == 2
    assert "round_skipped" in err or "rank-0" in err


def test_a_wait_that_is_over_skips_nobody():
    with service_of(engine_of()) as service:
        send(service, 1, frames_of(1, 2))
        wait = service.sequencer.waits()
        assert (wait.step, wait.missing) == (0, ["rank-0"])
        send(service, 0, frames_of(0, 1))  # and now step 1 waits for it
        service.sequencer.skip(wait)
        assert service.engine.global_step == 1
        service.sequencer.skip(service.sequencer.waits())
        assert service.engine.global_step == 2


@pytest.mark.parametrize("rows", [2, 20_000])  # of more bytes than a connection takes that nobody reads
def test_a_producer_that_is_far_ahead_can_leave_at_any_time(rows):
    """As at Ctrl-C: the service reads no further, and would not notice the end of its stream."""
    with service_of(engine_of()) as service, client_of(service) as client:

        def interrupted():
            with client.producer("rank-1") as producer:
                for number in range(8):
                    producer.send(frame(number, rows=rows, step=number))
                until(lambda: client.status()["rounds"]["early"] == {"rank-1": 2})
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        until(lambda: client.status()["streams"] == 0)


def test_an_error_of_the_thread_that_writes_is_that_of_the_producer(monkeypatch):
    def fails(*_):
        raise MemoryError("no memory for a frame")

    def sends(frame):
        producer.send(frame)
        producer.wait()

    with service_of(engine_of()) as service, client_of(service) as client:
        producer = client.producer("rank-0")
        monkeypatch.setattr("penstock.serving.flight.producer._PutStream._write", fails)
        with pytest.raises(MemoryError, match="no memory for a frame"):
            sends(frames_of(0, 1)[0])
        monkeypatch.undo()
        send(service, 1, frames_of(1, 1))
        producer.wait()
        producer.close()
        until(lambda: service.engine.global_step == 1)


def test_a_step_may_be_of_numpy_and_nothing_else():
    empty = frames_of(0, 1)[0].slice(0, 0)
    with service_of(engine_of()) as service, client_of(service) as client, client.producer("rank-0") as producer:
        assert producer.send(empty, step=np.int64(3)) == 1
        with pytest.raises(ps.UsageError, match="step: expected a whole number"):
            producer.send(empty, step="4")
        with pytest.raises(ps.UsageError, match="step: expected at least 0"):
            producer.send(empty, step=-1)


def test_more_workers_than_calls_are_refused(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    with Process(tmp_path / "c.pbtxt", "--workers", "256") as service:
        code, _, err = service.wait()
    assert (code, err) == (2, "penstock: 256 workers: their streams take all of 256 calls (--max-calls)\n")


@pytest.mark.promise("Workers in rounds have one hash, in any order of arrival and after any kill")
@pytest.mark.evidence
@pytest.mark.parametrize("case", range(12))
def test_kills_of_workers_and_of_the_service_leave_the_tables_of_a_replay(case):
    text, has_failed = run_case(case, free_port())
    assert not has_failed, text
