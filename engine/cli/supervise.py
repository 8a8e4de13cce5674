"""``penstock supervise``: start the processes of a job on this machine, and restart all of them when one dies."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import penstock.interrupts as interrupts
from penstock.cli.distributed import FLAGS, MAX_PROCESSES, newest_commit
from penstock.cli.options import add_command, parse, whole
from penstock.cli.output import say_error
from penstock.errors import UsageError

# Seconds between two polls of the processes.
TICK_S = 0.05
# Seconds for the remaining processes to exit after one has exited with a final code.
PARTING_S = 30.0
BACK_OFF_S, MOST_BACK_OFF_S = 1.0, 60.0
# Exit codes that a restart cannot fix: a failure, usage, input, configuration, state, and an interrupt.
FINAL = (1, 2, 3, 4, 5, 130)
LOST = 6


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "supervise",
        run,
        "penstock supervise --processes 4 -- replay tables.pbtxt day*.arrows --checkpoint saved --every 100",
    )
    command.add_argument(
        "--processes",
        type=whole(1, MAX_PROCESSES),
        default=1,
        metavar="N",
        help="number of processes of the job (default 1)",
    )
    command.add_argument(
        "--restarts",
        type=whole(0),
        default=10,
        metavar="N",
        help="give up after N failures in a row without a new commit (default 10)",
    )
    command.add_argument("job", nargs=argparse.REMAINDER, metavar="-- replay …", help="the command, with --checkpoint")


def run(args: argparse.Namespace) -> int:
    argv = args.job[1:] if args.job[:1] == ["--"] else args.job
    if args.json:
        argv = [*argv, "--json"]
    job = Job(argv, args.processes)
    interrupts.leave_to_caller(at_once=False)
    return supervised(job, args.restarts)


def supervised(job: Job, most_restarts: int) -> int:
    """Run a job, restart it until it finishes or ``most_restarts`` is exceeded, and return its exit code."""
    restarts, commit = 0, newest_commit(job.checkpoint)
    while True:
        code, why = job.run(again=restarts > 0)
        if code != LOST or interrupts.arrived():
            return interrupts.INTERRUPTED if interrupts.arrived() and code == LOST else code
        before, commit = commit, newest_commit(job.checkpoint)
        restarts = 1 if commit > before else restarts + 1
        if restarts > most_restarts:
            say_error(f"{why}; given up after {most_restarts} restarts without a new commit")
            return code
        say_error(f"{why}; starting again from {f'commit {commit}' if commit else 'the start'}")
        job.pause(min(BACK_OFF_S * 2 ** (restarts - 1), MOST_BACK_OFF_S))


class Job:
    """A replay command and the processes that run it."""

    def __init__(self, argv: Sequence[str], count: int) -> None:
        from penstock.cli.main import parser

        if not argv:
            raise UsageError(
                "supervise: give the command after --: supervise -- replay CONFIG SOURCE… --checkpoint DIR"
            )
        args = parse(parser(argv), argv)
        if args.command != "replay":
            raise UsageError(f"supervise: only replay can be supervised, not {args.command}")
        if args.checkpoint is None:
            raise UsageError("supervise: give replay a --checkpoint DIR, to resume from")
        if "-" in args.sources:
            raise UsageError("supervise: standard input cannot be read again after a restart; give files")
        if any(word.partition("=")[0] in FLAGS for word in argv):
            raise UsageError("supervise sets --distributed and its flags itself; leave them out")
        self._argv, self._count, self.checkpoint = list(argv), count, args.checkpoint
        self._resumes = args.resume
        if args.threads is None and count > 1:
            self._argv += ["--threads", str(max(1, (os.cpu_count() or 1) // count))]
        self._running: list[subprocess.Popen[bytes]] = []
        self._passed_on: signal.Signals | None = None

    def run(self, again: bool) -> tuple[int, str]:
        """Start all processes and wait for them. Return the exit code and, for LOST, which process ended and how."""
        self._running, self._passed_on = [], None
        try:
            for argv in self._commands(again):
                self._running.append(subprocess.Popen(argv, process_group=0))
            return self._ended()
        finally:
            self._kill()

    def pause(self, seconds: float) -> None:
        """Wait before the next start, or until a signal arrives."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not interrupts.arrived():
            time.sleep(TICK_S)

    def _pass_on(self) -> None:
        """Forward signals: the first as SIGTERM, which ends a process after a whole frame, the second as SIGKILL."""
        if not interrupts.arrived():
            return
        request = signal.SIGKILL if interrupts.arrived_again() else signal.SIGTERM
        if request == self._passed_on:
            return
        self._passed_on = request
        for process in self._running:
            if process.poll() is None:
                process.send_signal(request)

    def _commands(self, again: bool) -> Iterator[list[str]]:
        argv = [sys.executable, "-m", "penstock", *self._argv]
        if again and not self._resumes:
            argv.append("--resume")
        if self._count == 1:
            yield argv
            return
        coordinator = f"127.0.0.1:{_free_port()}"
        for number in range(self._count):
            flags = ("--coordinator", coordinator, "--process-id", str(number), "--processes", str(self._count))
            yield [*argv, "--distributed", *flags]

    def _ended(self) -> tuple[int, str]:
        while True:
            self._pass_on()
            codes = [process.poll() for process in self._running]
            bad = [(number, code) for number, code in enumerate(codes) if code]
            if bad:  # a process that only lost a peer (LOST) does not know the cause
                return self._judged(*min(bad, key=lambda entry: (entry[1] == LOST, entry[1] > 0)))
            if all(code == 0 for code in codes):
                return 0, ""
            time.sleep(TICK_S)

    def _judged(self, number: int, code: int) -> tuple[int, str]:
        """Return the exit code of the job after one process failed, and for LOST how that process ended."""
        if code in FINAL:
            until = time.monotonic() + PARTING_S
            while time.monotonic() < until and any(process.poll() is None for process in self._running):
                self._pass_on()
                time.sleep(TICK_S)
            return code, ""
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        return LOST, f"process {number} of {self._count} {how}"

    def _kill(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
