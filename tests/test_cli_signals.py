"""A running replay: Ctrl-C and its kin, and the progress line on a terminal."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from penstock.cli.output import ProgressLine, progress_text
from penstock.gate import Gate
from penstock.stats import Counters

COMMAND = [sys.executable, "-m", "penstock"]
CONFIG = """
table_descriptor {
  name: "user" vocabulary_size: 5000 dimension: 2
  optimization_parameters { adagrad {} learning_rate { constant: 0.1 } gradient_accumulation_status: ENABLED }
}
mode: TRAINING
"""
IDS = 1000
PIPE_BYTES = 1 << 16


def frame(step, ids=range(IDS)):
    values = np.random.default_rng(step).standard_normal(2 * len(ids)).astype(np.float32)
    return pa.RecordBatch.from_pydict(
        {
            "step": pa.array([step] * len(ids), pa.int64()),
            "id": pa.array(ids, pa.int64()),
            "gradient": pa.FixedSizeListArray.from_arrays(pa.array(values), 2),
        }
    )


def stream(*batches, end=True):
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, frame(0).schema)
    for batch in batches:
        writer.write_batch(batch)
    if end:
        writer.close()
    return sink.getvalue().to_pybytes()


END = stream()[-8:]
SCHEMA_BYTES = len(stream()) - len(END)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tables.pbtxt"
    path.write_text(CONFIG)
    return path


# ---- signals


class Feeder:
    """A replay whose standard input this test writes."""

    def __init__(self, config, out, stderr=subprocess.PIPE):
        argv = [*COMMAND, "replay", str(config), "-", "--out", str(out)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)

    def feed(self, content):
        self.process.stdin.write(content)
        self.process.stdin.flush()

    def feed_until_read(self):
        """More frames than a pipe holds, so that the process has surely begun to read when this returns."""
        frames = stream(*(frame(step) for step in range(12)), end=False)
        assert len(frames) > 2 * PIPE_BYTES
        self.feed(frames)

    def end(self):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out.decode(), (err or b"").decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_waits_for_input(number, config, tmp_path):
    feeder = Feeder(config, tmp_path / "out")
    feeder.feed_until_read()
    time.sleep(0.5)
    feeder.process.send_signal(number)
    code, out, err = feeder.end()
    assert (code, out) == (130, "")
    assert re.fullmatch(r"penstock: interrupted after step \d+; nothing was written\n", err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_while_frames_come_in(times, config, tmp_path):
    feeder = Feeder(config, tmp_path / "out")
    feeder.feed_until_read()
    more = stream(frame(12), end=False)[SCHEMA_BYTES:]

    def flood():
        with contextlib.suppress(OSError):  # the process is gone, and its pipe with it
            while True:
                feeder.feed(more)

    flooding = threading.Thread(target=flood)
    flooding.start()
    time.sleep(0.5)
    for _ in range(times):
        feeder.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    feeder.process.wait(60)
    flooding.join(60)
    with contextlib.suppress(OSError):
        feeder.process.stdin.close()
    err = feeder.process.stderr.read().decode()
    feeder.process.stdout.close()
    feeder.process.stderr.close()
    assert feeder.process.returncode == 130
    assert re.fullmatch("penstock: interrupted[^\n]*\n", err), err
    assert not (tmp_path / "out").exists()


def test_interrupted_while_a_named_pipe_has_no_writer(config, tmp_path):
    pipe = tmp_path / "log.fifo"
    os.mkfifo(pipe)
    process = subprocess.Popen([*COMMAND, "replay", str(config), str(pipe)], stderr=subprocess.PIPE)
    while True:  # a writer gets in once the reader has come
        try:
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 130
    assert err == b"penstock: interrupted after step 0; nothing was written\n"


# ---- progress


def test_progress_is_shown_on_a_terminal_and_wiped_at_the_end(config, tmp_path):
    master, slave = pty.openpty()
    feeder = Feeder(config, tmp_path / "out", stderr=slave)
    os.close(slave)
    feeder.feed_until_read()
    for number in range(12, 16):
        time.sleep(0.25)
        feeder.feed(stream(frame(number), end=False)[SCHEMA_BYTES:])
    feeder.feed(END)
    code, out, _ = feeder.end()
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # the other side has closed it, and all is read
            break
    os.close(master)
    assert code == 0
    assert "16 steps" in out
    drawn = shown.decode().split("\r")
    assert len(drawn) > 4
    assert re.fullmatch(r"[\d,]+ rows  [\d,]+ rows/s  step \d+ *", drawn[1])
    assert drawn[-2].isspace()
    assert drawn[-1] == ""
    assert "\n" not in shown.decode()


def test_progress_tells_drops_and_the_time_left():
    counters, gate = Counters(rows=3000, stale=2), Gate()
    gate.global_step = 1234
    counters.dropped["id_null"] = 5
    text = progress_text(counters, gate, 0.25, 30.0)
    assert text == "3,000 rows  100 rows/s  step 1,234  2 stale frames  5 rows dropped   25%  1:30 left"
    assert progress_text(Counters(rows=3), Gate(), None, 0.0) == "3 rows  0 rows/s  step 0"


def test_progress_tells_how_full_the_gate_is_where_it_waits_for_several():
    gate = Gate(num_required=4)
    gate.admit(None, lambda: None)
    assert progress_text(Counters(rows=3), gate, None, 1.0) == "3 rows  3 rows/s  step 0  gate 1/4"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("term", "shown"), [("dumb", "3 rows  0 rows/s  step 0\n"), ("xterm", "\r3 rows  0 rows/s  step 0")]
)
def test_a_terminal_that_cannot_redraw_gets_plain_lines_and_nobody_gets_colours(term, shown, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    monkeypatch.setenv("TERM", term)
    progress = ProgressLine()
    progress(Counters(rows=3), Gate(), None)
    progress(Counters(rows=4), Gate(), None)  # too soon after the first
    assert terminal.getvalue() == shown
