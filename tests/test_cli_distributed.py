"""Real processes: ``replay --distributed`` and ``supervise``, with one of them killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import ROWS, batch, commits, config_of
from ipc import write
from limits import HANG_S, until

from penstock.checkpoint.store import Folder
from penstock.cli.main import main
from penstock.engine import Engine

PENSTOCK = [sys.executable, "-m", "penstock"]


@pytest.fixture
def job(tmp_path):
    """CONFIG and sources of a log that three workers wrote."""
    config_of().save(tmp_path / "c.pbtxt")
    logs = [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(30)]) for n in range(3)]
    return ["replay", str(tmp_path / "c.pbtxt"), *logs, "--num-required", "3"]


@pytest.fixture
def wanted(job, capsys):
    """The state hash of one process."""
    assert main([*job, "--merge", "round", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["state_hash"]


def start(words, **popen):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **popen
    )


def ended(process):
    """Exit code, stdout, stderr."""
    out, err = process.communicate(timeout=HANG_S)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ranks(job, count, *more):
    flags = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    return [start([*job, *flags, "--process-id", str(rank), *more]) for rank in range(count)]


def slow(job, tmp_path, steps=200):
    """The same with logs that take a while: rows come several times, so that they are quick to make."""
    batches = [batch(step, 0) for step in range(10)]
    at = batches[0].schema.get_field_index("step")
    for source in job[2:5]:
        again = [batches[n % 10].set_column(at, "step", pa.array([n] * 40, pa.int64())) for n in range(steps)]
        write(source, again)
    return [*job, "--checkpoint", str(tmp_path / "saved"), "--every", "5"]


@contextmanager
def held(source):
    """In here the source is a pipe that gives half of its content and then waits, so that no run reaches its end.

    Gives a function that puts the whole file in the pipe's place, for runs that begin later.
    """
    content, over = Path(source).read_bytes(), threading.Event()
    os.unlink(source)
    os.mkfifo(source)
    writer = os.open(source, os.O_RDWR)  # which waits for no reader

    def feed():
        with open(writer, "wb") as pipe:
            pipe.write(content[: len(content) // 2])
            pipe.flush()
            over.wait()

    def release():
        whole = Path(f"{source}.whole")
        whole.write_bytes(content)
        whole.replace(source)

    threading.Thread(target=feed, daemon=True).start()
    try:
        yield release
    finally:
        over.set()


def children(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


def wait_for_commit(folder, number, process):
    def there():
        assert process.poll() is None, process.communicate()
        return max(Folder(folder).numbers(), default=0) >= number

    until(there)


def test_two_processes_with_two_devices_each_end_as_one_does_and_the_first_speaks(job, wanted, tmp_path):
    shown = ("--metrics-file", str(tmp_path / "metrics"), "--report", str(tmp_path / "page"))
    first, second = ranks(job, 2, "--devices", "2", "--json", "--out", str(tmp_path / "out"), *shown)
    code, out, _ = ended(first)
    assert (code, json.loads(out)["state_hash"]) == (0, wanted)
    assert [os.path.basename(path) for path in json.loads(out)["out"]] == ["user.parquet", "item.parquet"]
    assert ended(second)[:2] == (0, "")
    told = json.loads(out)["processes"]
    assert [process["rows"] for process in told] == [2400, 1200]
    last = json.loads((tmp_path / "metrics").read_text().splitlines()[-1])
    assert last["penstock_process_rows_total"] == {"0": 2400, "1": 1200}
    assert sum(last["penstock_table_rows_total"].values()) == 3600
    assert "<h2>Processes</h2>" in (tmp_path / "page" / "index.html").read_text()


def test_a_bad_row_ends_every_process_with_the_same_line_and_code(job, tmp_path):
    write(job[3], [batch(0, 1), batch(1, 1).set_column(3, "id", pa.array([ROWS] * 40))])
    for process in ranks(job, 2):
        code, _, err = ended(process)
        assert code == 3
        assert f"{job[3]}: batch 1, row 0, column 'id': expected 0 <= id < {ROWS}" in err


def test_a_killed_process_ends_the_others_with_its_name(job, tmp_path):
    job = slow(job, tmp_path)
    with held(job[4]):
        first, second = ranks(job, 2)
        wait_for_commit(tmp_path / "saved", 1, first)
        second.kill()
        second.communicate()
        code, _, err = ended(first)
    assert code == 6
    assert "process 1 of 2 is gone" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_supervised_job_of_which_a_process_is_killed_ends_as_an_unbroken_one(job, tmp_path, rank):
    job = [*slow(job, tmp_path, 120), "--deltas", str(tmp_path / "deltas"), "--deltas-slots", "all"]
    with held(job[4]) as release:
        supervisor = start(["supervise", "--processes", "2", "--json", "--", *job])
        wait_for_commit(tmp_path / "saved", 1, supervisor)
        release()
        os.kill(children(supervisor)[rank], signal.SIGKILL)
        code, out, err = ended(supervisor)
    assert code == 0
    assert f"process {rank} of 2 was killed (SIGKILL); starting again from commit" in err
    assert json.loads(out)["skipped"] > 0
    unbroken = Engine(config_of(), num_required=3)
    unbroken.run(job[2:5], merge="round", deltas=tmp_path / "unbroken", slots=True)
    assert json.loads(out)["state_hash"] == unbroken.state_hash()
    assert deltas_in(tmp_path / "deltas") == deltas_in(tmp_path / "unbroken")


def deltas_in(file):
    with pa.ipc.open_stream(file) as stream:
        return [batch.serialize().to_pybytes() for batch in stream if batch.num_rows]


def test_a_signal_ends_all_processes_after_the_same_frame(job, tmp_path):
    job = [*slow(job, tmp_path, 120), "--deltas", str(tmp_path / "deltas")]
    with held(job[4]) as release:
        supervisor = start(["supervise", "--processes", "2", "--", *job])
        wait_for_commit(tmp_path / "saved", 1, supervisor)
        supervisor.send_signal(signal.SIGTERM)
        code, _, err = ended(supervisor)
        release()
    assert code == 130
    assert "interrupted after step" in err
    kept = Engine.restore(tmp_path / "saved")
    saved = {"checkpoint": tmp_path / "saved", "deltas": tmp_path / "deltas"}
    report = kept.run(job[2:5], merge="round", resume=True, **saved)
    unbroken = Engine(config_of(), num_required=3)
    unbroken.run(job[2:5], merge="round", deltas=tmp_path / "unbroken")
    assert 0 < report.skipped < 360
    assert kept.state_hash() == unbroken.state_hash()
    assert deltas_in(tmp_path / "deltas") == deltas_in(tmp_path / "unbroken")


def test_a_job_that_cannot_go_well_is_not_started_again(job, tmp_path):
    write(job[3], [batch(0, 1), batch(1, 1).set_column(3, "id", pa.array([ROWS] * 40))])
    code, _, err = ended(start(["supervise", "--processes", "2", "--", *job, "--checkpoint", str(tmp_path / "saved")]))
    assert code == 3
    assert "starting again" not in err
    assert commits(tmp_path / "saved")[-1] == "00000001.commit"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--coordinator", "127.0.0.1:1"], "--coordinator: needs --distributed"),
        (["--distributed", "--processes", "2"], "--distributed: also give --coordinator"),
        (
            ["--distributed", "--coordinator", "here", "--process-id", "0", "--processes", "1"],
            "--coordinator here: expected HOST:PORT",
        ),
        (
            ["--distributed", "--coordinator", "h:1", "--process-id", "2", "--processes", "2"],
            "--process-id 2: of 2 processes the last is 1",
        ),
        (["--distributed", "--merge", "step"], "--merge step: several processes take a frame of each source in turn"),
    ],
)
def test_flags_that_do_not_go_together_are_a_usage_error(job, capsys, words, problem):
    assert main([*job, *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give the command after --"),
        (["--", "inspect", "x"], "only replay can be supervised, not inspect"),
        (["--", "replay", "c", "a"], "give replay a --checkpoint DIR"),
        (["--", "replay", "c", "-", "--checkpoint", "d"], "standard input cannot be read again"),
        (["--", "replay", "c", "a", "--checkpoint", "d", "--distributed"], "sets --distributed and its flags itself"),
        (["--", "replay", "c", "a", "--unheard-of"], "unknown flag --unheard-of"),
    ],
)
def test_commands_that_cannot_be_supervised_are_usage_errors(capsys, words, problem):
    assert main(["supervise", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_process_that_cannot_be_started_leaves_no_other_behind(job, tmp_path, capsys, monkeypatch):
    started, popen = [], subprocess.Popen

    def one_alone(words, **options):
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", one_alone)
    words = ["supervise", "--processes", "2", "--", *job, "--checkpoint", str(tmp_path / "saved")]
    assert main(words) == 6
    assert "Resource temporarily unavailable" in capsys.readouterr().err
    assert started[0].poll() == -signal.SIGKILL
