"""A running command: signals, also while it loads, and the progress line on a terminal."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli import COMMAND, frame, started, table
from faults.signals import Harness, catches
from ipc import stream
from limits import HANG_S, suspend, until

import penstock as ps
from penstock.cli.output import ProgressLine, progress_text
from penstock.core.gate import Gate
from penstock.model.stats import Counters

CONFIG = table(rows=5000) + "mode: TRAINING\n"
IDS = range(1000)
PIPE_BYTES = 1 << 16
END = stream([frame()])[-8:]
SCHEMA_BYTES = len(stream([], schema=frame().schema)) - len(END)


# ---- signals


class Feeder:
    """A replay whose standard input this test writes."""

    def __init__(self, config, out, stderr=subprocess.PIPE):
        self.process = started("replay", config, "-", "--out", out, stderr=stderr)

    def feed(self, content):
        self.process.stdin.write(content)
        self.process.stdin.flush()

    def feed_until_read(self):
        """More frames than a pipe holds, so that the process has surely begun to read when this returns."""
        frames = stream([frame(step, IDS) for step in range(12)], end=False)
        assert len(frames) > 2 * PIPE_BYTES
        self.feed(frames)

    def end(self):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, out.decode(), (err or b"").decode()


@pytest.mark.sampled("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_waits_for_input(number, config, tmp_path):
    feeder = Feeder(config, tmp_path / "out")
    feeder.feed_until_read()
    feeder.process.send_signal(number)
    code, out, err = feeder.end()
    assert (code, out) == (130, "")
    assert re.fullmatch(r"penstock: interrupted after step \d+; nothing was written\n", err)
    assert not (tmp_path / "out").exists()


def test_a_closed_terminal_loses_no_frame_and_nohup_is_kept(config, tmp_path):
    words = [*COMMAND, "replay", config, "-", "--checkpoint"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    nohup = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    with (
        subprocess.Popen([*words, tmp_path / "state"], **pipes) as ends,
        subprocess.Popen([*nohup, *words, tmp_path / "nohup"], **pipes) as goes_on,
    ):
        for process in (ends, goes_on):
            process.stdin.write(stream([frame(step, IDS) for step in range(12)], end=False))
            process.stdin.flush()
            process.send_signal(signal.SIGHUP)
        _, err = ends.communicate(timeout=HANG_S)
        assert ends.returncode == 130
        assert re.fullmatch(rb"penstock: interrupted after step \d+; committed to [^\n]+\n", err), err
        goes_on.stdin.write(END)
        _, err = goes_on.communicate(timeout=HANG_S)
        assert (goes_on.returncode, err) == (0, b"")
    assert ps.Engine.restore(tmp_path / "state").global_step > 0
    assert ps.Engine.restore(tmp_path / "nohup").global_step == 12


def test_every_signal_that_would_end_a_command_interrupts_it():
    """In a process that exists only for this: one that handles none of them by itself."""
    script = """
import os, signal
import penstock.base.interrupts as interrupts
names = "HUP INT QUIT TERM USR1 USR2 ALRM VTALRM PROF XCPU".split()
for number in [*(getattr(signal, f"SIG{name}") for name in names), getattr(signal, "SIGRTMIN", signal.SIGHUP)]:
    interrupts.install()
    os.kill(os.getpid(), number)
    try:
        interrupts.check()
    except KeyboardInterrupt:
        interrupts.remove()
        assert number == signal.SIGINT or signal.getsignal(number) == signal.SIG_DFL
    else:
        print("not interrupted by", number)
signal.signal(signal.SIGUSR1, lambda *_: print("its own"))
interrupts.install()
os.kill(os.getpid(), signal.SIGUSR1)
interrupts.check()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("its own\n", "")


def test_interrupted_while_a_named_pipe_has_no_writer(config, tmp_path):
    pipe = tmp_path / "log.fifo"
    os.mkfifo(pipe)
    process = started("replay", config, pipe)
    writer = open_once_read(pipe, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_S)
    os.close(writer)
    assert process.returncode == 130
    assert err == b"penstock: interrupted after step 0; nothing was written\n"


def test_interrupted_while_its_deltas_pipe_has_no_reader(config, tmp_path):
    pipe = tmp_path / "deltas.fifo"
    os.mkfifo(pipe)
    with started("replay", config, "-", "--deltas", pipe) as process:
        wait_for_handlers(process)
        process.send_signal(signal.SIGINT)
        process.wait(HANG_S)
        err = process.stderr.read()
    assert (process.returncode, err.count(b"\n")) == (130, 1), err
    assert err.startswith(b"penstock: interrupted")


def test_an_interrupted_pipeline_is_no_truncated_input(config, tmp_path):
    """Ctrl-C goes to every process of a pipeline."""
    feeder = Feeder(config, tmp_path / "out")
    feeder.feed_until_read()
    suspend(feeder.process)
    feeder.process.send_signal(signal.SIGINT)
    feeder.process.stdin.close()
    feeder.process.send_signal(signal.SIGCONT)
    feeder.process.wait(HANG_S)
    err = feeder.process.stderr.read().decode()
    feeder.process.stdout.close()
    feeder.process.stderr.close()
    assert feeder.process.returncode == 130, err
    assert re.fullmatch("penstock: interrupted[^\n]*\n", err), err


def test_a_second_signal_ends_a_command_that_does_not_answer(tmp_path):
    config = tmp_path / "tables.pbtxt"
    os.mkfifo(config)  # without content: one read blocks, and does not check for signals
    process = started("replay", config, "-")
    writer = open_once_read(config, process)

    def ended():
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    until(ended)
    os.close(writer)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == b"penstock: interrupted twice, ended at once; what was committed before stays\n"


def open_once_read(pipe, process):
    """A descriptor to write to a pipe; the process has opened it then."""
    opened = []

    def there():
        assert process.poll() is None
        with contextlib.suppress(OSError):
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return opened

    until(there)
    return opened[0]


def wait_for_handlers(process):
    until(lambda: process.poll() is not None or catches(process.pid, signal.SIGTERM))
    assert process.poll() is None


# ---- signals while a command loads


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("signals"))


@pytest.mark.evidence
@pytest.mark.parametrize("number", range(12))
def test_a_signal_in_the_first_two_seconds(harness, number):
    assert harness.check(number).problem == ""


def test_the_entry_point_installs_its_handlers_before_it_loads_anything():
    seen = """
import signal, sys
known = set(sys.modules)
def install(*_):
    print(*sorted(set(sys.modules) - known))
    raise SystemExit
signal.signal = install
from penstock.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["penstock", "penstock.__main__", "penstock.base", "penstock.base.interrupts"]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"penstock": "penstock.__main__:main"}


# ---- progress


def test_progress_is_shown_on_a_terminal_and_wiped_at_the_end(config, tmp_path):
    master, slave = pty.openpty()
    feeder = Feeder(config, tmp_path / "out", stderr=slave)
    os.close(slave)
    feeder.feed_until_read()
    shown, steps = b"", 12

    def drawn_again():
        """Feed a step and read what the terminal shows: redrawn several times, however long a step takes."""
        nonlocal shown, steps
        feeder.feed(stream([frame(steps, IDS)], end=False)[SCHEMA_BYTES:])
        steps += 1
        while select.select([master], [], [], 0.05)[0]:
            shown += os.read(master, 4096)
        return shown.count(b"\r") > 3

    until(drawn_again)
    feeder.feed(END)
    code, out, _ = feeder.end()
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:  # the other side has closed it, and all is read
            break
    os.close(master)
    assert code == 0
    assert f"{steps} steps" in out
    drawn = shown.decode().split("\r")
    assert re.fullmatch(r"[\d,]+ rows  [\d,]+ rows/s  step \d+ *", drawn[1])
    assert drawn[-2].isspace()
    assert drawn[-1] == ""
    assert "\n" not in shown.decode()


def test_progress_shows_drops_and_the_time_left():
    counters, gate = Counters(rows=3000, stale=2), Gate()
    gate.global_step = 1234
    counters.dropped["id_null"] = 5
    text = progress_text(counters, gate, 0.25, 30.0)
    assert text == "3,000 rows  100 rows/s  step 1,234  2 stale frames  5 rows dropped   25%  1:30 left"
    assert progress_text(Counters(rows=3), Gate(), None, 0.0) == "3 rows  0 rows/s  step 0"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("term", "shown"), [("dumb", "3 rows  0 rows/s  step 0\n"), ("xterm", "\r3 rows  0 rows/s  step 0")]
)
def test_a_dumb_terminal_gets_plain_progress_lines_without_colours(term, shown, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    monkeypatch.setenv("TERM", term)
    progress = ProgressLine()
    progress(Counters(rows=3), Gate(), None)
    progress(Counters(rows=4), Gate(), None)  # too soon after the first
    assert terminal.getvalue() == shown
