"""``penstock serve`` as a process, with trainers and readers as processes: killed, ended, refused."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pyarrow.flight as flight
import pytest
from ipc import write
from limits import HANG_S, in_thread, suspend, until
from services import Process, config_of, frame, free_port, replayed

import penstock as ps
import penstock.serving.flight.connection as connection
from penstock.cli.main import main
from penstock.serving.flight import connect

NUM_FRAMES = 240

CONFIG = config_of()


@pytest.fixture
def frames(tmp_path):
    made = [frame(n) for n in range(NUM_FRAMES)]
    write(tmp_path / "log", made)
    return made


WAITING_CLIENT = """
import sys
import pyarrow as pa
import penstock.base.limited_calls as limited_calls
import penstock.serving.flight.producer as producers
from penstock.serving.flight import connect

frame = pa.table({"id": [1], "gradient": [[1.0] * 4]})
large = frame.take([0] * 1_000_000)  # more than a stopped service takes from the network
with connect(sys.argv[1]) as client, client.producer("rank-0") as producer:
    producer.send(frame)
    producer.poll()
    print("ready", flush=True)
    sys.stdin.readline()
    limited_calls.LOG_EVERY_S = producers.LOG_EVERY_S = 0.2
    eval(sys.argv[2])
"""
WAITS = [
    "producer.send(frame), producer.close()",
    "producer.send(large), producer.close()",
    "client.position('rank-0')",
    "client.table('user')",
]


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
@pytest.mark.parametrize("wait", WAITS)
def test_a_client_says_that_a_stopped_service_does_not_answer_and_one_signal_ends_it(config, wait, workers):
    command = [sys.executable, "-c", WAITING_CLIENT]
    with Process(config, *workers) as service:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        client = subprocess.Popen([*command, service.uri, wait], text=True, **pipes)
        assert client.stdout.readline() == "ready\n"
        suspend(service.process)
        client.stdin.write("\n")
        client.stdin.flush()
        line = client.stderr.readline()
        assert line.startswith(f'waiting service="{service.uri}" seconds=')
        client.send_signal(signal.SIGINT)
        _, err = client.communicate(timeout=HANG_S)
        assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.evidence
@pytest.mark.promise("A service that is killed loses no frame and applies none twice")
def test_killed_three_times_and_nothing_is_lost_or_applied_twice(tmp_path, config, frames):
    listen, sendable = f"grpc://127.0.0.1:{free_port()}", threading.Semaphore(0)
    serve = [config, "--listen", listen, "--checkpoint", tmp_path / "c", "--resume"]
    serve += ["--every", "7", "--num-required", "2"]

    def train():
        with connect(listen, patience_s=HANG_S) as client, client.producer("trainer", first=1) as producer:
            for each in frames:
                sendable.acquire()
                producer.send(each)
        return producer.acked

    training = in_thread(train)
    for steps in (25, 55, 85):  # and frames of five more are on their way
        with Process(*serve) as service, connect(listen, patience_s=HANG_S) as client:
            sendable.release(NUM_FRAMES // 4)
            until(lambda: client.status()["global_step"] >= steps)  # noqa: B023
            service.end(signal.SIGKILL)
    with Process(*serve) as service:
        sendable.release(NUM_FRAMES // 4)
        acked = training()
        assert (acked.position, acked.applied, acked.stale) == (NUM_FRAMES, NUM_FRAMES, 0)
        code, _, err = service.end(signal.SIGTERM)
        assert (code, err) == (0, "")
    whole = replayed(frames, num_required=2)
    assert ps.Engine.restore(tmp_path / "c").state_hash() == whole.state_hash()


def test_a_learning_rate_that_only_frames_can_give_is_logged_at_the_start(tmp_path):
    config_of(optimizer=ps.SGD(lambda step: 0.1 / (1 + step))).save(tmp_path / "c.pbtxt")
    advice = "frames need a 'learning_rates' column, or add --learning-rate 0=VALUE"
    for flags, line in ([], f'warning learning_rate_missing tags=[0] advice="{advice}"\n'), (["0=0.5"], ""):
        flags = [word for flag in flags for word in ("--learning-rate", flag)]
        with Process(tmp_path / "c.pbtxt", *flags) as service:
            code, _, err = service.end(signal.SIGTERM)
        assert (code, err.partition("Z ")[2]) == (0, line)


@pytest.mark.promise("A signal ends a command after a whole frame, which it commits")
@pytest.mark.sampled("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_a_signal_it_commits_whole_frames_and_tells_its_producers(number, tmp_path, config, frames):
    with Process(config, "--checkpoint", tmp_path / "c") as service, connect(service.uri, patience_s=0.1) as client:
        producer = client.producer("w0")
        for each in frames[:5]:
            producer.send(each)
        until(lambda: client.status()["frames"] == 5)
        code, out, err = service.end(number)
        line = f"penstock: interrupted after step 5; committed to {tmp_path / 'c'} (--resume continues)\n"
        assert (code, err) == ((0, "") if number == signal.SIGTERM else (130, line))
        assert "frames    5: 100 rows, 5 steps\n" in out
        assert producer.wait().position == 5
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(frames[:5]).state_hash()


def test_a_drained_service_writes_its_tables_and_a_report(tmp_path, config, frames):
    with Process(config, "--out", tmp_path / "out") as service:
        with connect(service.uri) as client:
            client.put(frames[:5], "w0")
            client.drain()
        code, out, err = service.wait()
        assert (code, err) == (0, "")
        assert "5: 100 rows, 5 steps" in out
        assert replayed(frames[:5]).state_hash() in out
    again = ps.Engine(config_of())
    again.read_tables(tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(again.table("user")), np.asarray(replayed(frames[:5]).table("user")))


def test_the_final_report_of_a_service_counts_stale_frames(config):
    with Process(config) as service:
        with connect(service.uri) as client:
            client.put([frame(0, step=0)], "w0")
            client.put([frame(0, step=0), frame(1, step=0)], "w1")
            client.drain()
        code, out, err = service.wait()
    assert (code, err.count("\n"), " warning stale_frame contributor=" in err) == (0, 1, True)
    assert "frames    3: 60 rows, 1 step, 2 stale\n" in out


def test_a_drained_service_ends_although_calls_are_open(config, frames):
    with Process(config, "--grace", "1", "--json") as service, connect(service.uri, patience_s=0.1) as client:
        client.put(frames[:2], "w0")
        raw, _ = client.connection.opened()
        follow = raw.do_get(flight.Ticket(b'{"deltas":{"follow":true}}'))
        writer, _ = raw.do_put(flight.FlightDescriptor.for_path("gradients", "idle"), frames[0].schema)
        writer.write_batch(frames[0])
        until(lambda: client.status()["frames"] == 3)
        follow.read_chunk()
        client.drain()
        code, out, _ = service.wait()
    assert code == 0
    assert json.loads(out)["frames"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "grpc://0.0.0.0:0"], "others can reach this address, and it lacks encryption"),
        (["--listen", "grpc+tls://127.0.0.1:0"], "give --tls-cert FILE and --tls-key FILE"),
        (["--listen", "http://127.0.0.1"], "expected an address such as grpc://127.0.0.1:8815"),
        (["--token-file", "nowhere"], "--token-file nowhere: cannot be read"),
        (["--every", "5"], "--every: name a checkpoint"),
        (["--max-calls", "0"], "expected at least 1"),
    ],
)
def test_wrong_flags_of_serve_are_exit_2_before_it_starts(config, words, message, capsys):
    assert main(["serve", str(config), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_exit_6(config, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(config), "--listen", f"grpc://127.0.0.1:{taken.getsockname()[1]}"]) == 6
    assert "cannot listen at grpc://127.0.0.1" in capsys.readouterr().err


def test_a_folder_of_shared_tables_that_is_removed_is_noticed_at_the_next_commit(tmp_path):
    config_of().save(tmp_path / "t.pbtxt")
    words = ("--checkpoint", tmp_path / "run", "--shared", tmp_path / "shared")
    with Process(tmp_path / "t.pbtxt", *words) as serving, connect(serving.uri, patience_s=0.1) as client:
        client.put([frame(0)], "w0")
        shutil.rmtree(tmp_path / "shared")
        with pytest.raises(ps.ServiceError):
            client.put([frame(1)], "w0")
        code, _, text = serving.wait()
    line = f"penstock: {tmp_path / 'shared'}: cannot write: the shared tables are gone: the folder was removed or "
    assert (code, text) == (6, f"{line}replaced; start again\n")


@pytest.mark.evidence
def test_a_service_that_freezes_in_mid_stream_is_noticed(tmp_path, monkeypatch):
    """By gRPC, sooner here: a service accepts pings of a quiet stream only every 5 minutes."""
    monkeypatch.setattr(connection, "KEEPALIVE_MS", 10_000)
    monkeypatch.setattr(connection, "ANSWER_MS", 1000)
    config_of().save(tmp_path / "t.pbtxt")

    def frames():
        yield frame(1)
        suspend(serving.process)
        yield from map(frame, range(2, 9))

    with Process(tmp_path / "t.pbtxt") as serving, connect(serving.uri, patience_s=0.1) as client:
        client.put([frame(0)], "w0")
        with pytest.raises(ps.ServiceError, match=f"{serving.uri}: Stream removed"):
            client.put(frames(), "w0")
