"""Runs the command line in children of one process that has imported everything, and says how each child ended.

A child is forked for every case: starting Python and importing jax and pyarrow takes 2 s, a fork 10 ms. Neither must
have been used in the parent, only imported: a forked child has none of their threads, but all the locks these held.
"""

import contextlib
import os
import pickle
import re
import resource
import select
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax  # noqa: F401 (imported once, for all children)
import pyarrow.parquet  # noqa: F401
from forked import become_command

import penstock.checkpoint.session
import penstock.engine  # noqa: F401
from penstock.cli.main import parser

parser()  # imports every command

# What a run away child may take before the machine suffers; far above the 256 MiB that are looked for.
ADDRESS_SPACE_BYTES = 24 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    code : exit code, negative for a signal, None where it did not end in time
    anon_mib : the most anonymous memory that it had, what it shares with the parent included
    """

    code: int | None
    stdout: str
    stderr: str
    anon_mib: float
    seconds: float

    def problem(self, baseline_mib: float, most_mib: float, codes: tuple[int, ...] = (0, 3, 4)) -> str | None:
        """Return its problem; None if it gave a result, or one line and one of the exit codes."""
        if self.code is None:
            return f"hangs: not done after {self.seconds:.0f} s"
        if self.code < 0:
            return f"signal {signal.Signals(-self.code).name}"
        if "Traceback" in self.stderr:
            return "a traceback"
        if self.code not in codes:
            return f"exit code {self.code}"
        # With --json, messages for people go to stderr.
        lines = [] if self.code == 0 and self.stdout.startswith("{") else self.stderr.splitlines()
        if len(lines) > 1 or (lines and not lines[0].startswith("penstock: ")):
            return f"{len(lines)} lines on stderr"
        if self.code and not lines and not re.search(r"^error ", self.stdout, re.MULTILINE):
            return "an exit code without a line that says why"
        if self.anon_mib > baseline_mib + most_mib:
            return f"{self.anon_mib - baseline_mib:.0f} MiB more than a run on the good file"
        return None


def run(words: list[str], limit_s: float) -> Ended:
    """``penstock WORDS`` in a child."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            become_command(words, out.fileno(), err.fileno())
        code, anon_mib = _wait(child, limit_s)
        seconds = time.monotonic() - started
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(1 << 20).decode("utf-8", "backslashreplace"))
    return Ended(code, *texts, anon_mib, seconds)


def apart(make: Callable[[], T]) -> T:
    """What ``make`` gives, made in a child: the threads of what it uses start there, and none is here at a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(make(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        made: T = pickle.load(pipe)
    os.waitpid(child, 0)
    return made


def _wait(child: int, limit_s: float) -> tuple[int | None, float]:
    """The exit code, and the most anonymous memory seen. Looked at every few milliseconds, and when it has ended."""
    deadline = time.monotonic() + limit_s
    pidfd = os.pidfd_open(child)
    anon_kib = 0
    try:
        while not select.select([pidfd], [], [], 0.004)[0]:
            anon_kib = max(anon_kib, _anon_kib(child))
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.wait4(child, 0)
                return None, anon_kib / 1024
    finally:
        os.close(pidfd)
    _, status, usage = os.wait4(child, 0)
    # ru_maxrss misses nothing, but counts the pages of files too: it bounds what the looks may have missed.
    return os.waitstatus_to_exitcode(status), max(anon_kib, usage.ru_maxrss) / 1024


def _anon_kib(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0
