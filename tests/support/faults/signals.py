"""Signals in the first two seconds of ``serve`` and ``replay``: ``python tests/support/faults/signals.py --cases 500``.

Every case starts a command that does not end by itself, and sends SIGINT or SIGTERM once: at a random moment of the two
seconds after the command has installed its handlers, or when a random number of the libraries of pyarrow and jaxlib are
mapped, so that the signal arrives while the next one initializes. The command must then end with code 130 and one line,
or ``serve`` after SIGTERM with code 0, and its checkpoint must hold the state after some whole frames. Every eleventh
case sends the signal earlier: Python may then end as Python does, but what lies on disk must be whole. ``--only
NUMBER`` runs one case again.
"""

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import penstock as ps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cli import frame, started
from ipc import stream
from limits import HANG_S, until

COMMANDS = ("replay", "serve")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WINDOW_S = 2.0
START_S = 0.15  # about what Python needs before it runs the first line of ours
FRAMES, ROWS = 3, 20
SLOW_LIBRARIES = ("/jaxlib/", "/pyarrow/")
NO_FRAME = re.compile(r"penstock: [^\n]*\n")


@dataclass(frozen=True)
class Case:
    """early : the signal is sent before the handlers stand"""

    number: int
    command: str
    signal: signal.Signals
    early: bool


@dataclass(frozen=True)
class Outcome:
    """problem : which promise did not hold; loading : the signal arrived while libraries were being loaded"""

    case: Case
    code: int
    loading: bool
    problem: str


def case_of(number):
    return Case(number, COMMANDS[number % 2], SIGNALS[number // 2 % 2], number % 11 == 10)


class Harness:
    """A configuration, a log, and the states that its whole frames leave."""

    def __init__(self, folder, seed=0):
        self.folder, self.seed = Path(folder), seed
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)  # else the commands inherit it
        self.config = self.folder / "tables.pbtxt"
        config = ps.EmbeddingConfig.from_tables([ps.TableConfig(200, 2, name="user", optimizer=ps.Adagrad(0.1))])
        config.save(self.config)
        batches = [frame(number, range(ROWS)) for number in range(FRAMES)]
        self.log = stream(batches, end=False)  # the input continues
        engine = ps.Engine(config)
        self.states = [engine.state_hash()]
        for each in batches:
            engine.run(iter([each]))
            self.states.append(engine.state_hash())
        self.num_libraries = self._libraries_of_a_whole_start()

    def start(self, command, checkpoint):
        words = ["-", "--every", "1"] if command == "replay" else ["--listen", "grpc://127.0.0.1:0"]
        process = started(command, self.config, "--checkpoint", checkpoint, *words)
        if command == "replay":
            process.stdin.write(self.log)  # fits into a pipe
            process.stdin.flush()
        return process

    def check(self, number):
        """Run one case."""
        case, rng = case_of(number), random.Random(f"{self.seed} {number}")
        checkpoint = self.folder / f"case{number}"
        process = self.start(case.command, checkpoint)
        try:
            standing = self._wait_for_the_moment(process, case, rng)
            num_loaded = loaded(process.pid)
            loading = standing and 0 < num_loaded < self.num_libraries[case.command]
            process.send_signal(case.signal)
            lost = not self._ends(process)
            if lost:
                if not case.early or case.signal != signal.SIGINT:
                    return Outcome(case, 0, loading, "the signal was ignored")
                process.send_signal(case.signal)
                if not self._ends(process):
                    return Outcome(case, 0, loading, "two signals were ignored")
            out, err = process.stdout.read().decode(), process.stderr.read().decode()
            # Before our handlers stand, Python ignores the exception of a Ctrl-C within a callback, and says so.
            if lost and "Exception ignored in" not in err:
                return Outcome(case, 0, loading, f"the signal was ignored: {err}")
            err = err[max(err.rfind("penstock: "), 0) :] if lost else err
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
            process.wait()
        return Outcome(case, process.returncode, loading, self._problem(case, process.returncode, out, err, checkpoint))

    def _ends(self, process):
        try:
            process.wait(HANG_S)  # not communicate(), which would end the input of replay
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_for_the_moment(self, process, case, rng):
        """Whether the handlers stand."""
        if case.early:
            time.sleep(rng.uniform(0, START_S))
            return False
        while not catches(process.pid, signal.SIGTERM):
            if process.poll() is not None:
                return False
            time.sleep(0.001)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, WINDOW_S))
        else:
            wanted = rng.randrange(1, self.num_libraries[case.command])
            while loaded(process.pid) < wanted and process.poll() is None:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.02))
        return True

    def _problem(self, case, code, out, err, checkpoint):
        """Return the problem of a case; "" if it behaved as documented."""
        lost = self._lost(checkpoint)
        if lost:
            return lost
        if case.early and not (code == 130 and err.startswith("penstock: ")) and code != 0:
            # Python's own end: of a process that was killed, or KeyboardInterrupt's.
            usual = code == -case.signal or (case.signal == signal.SIGINT and "KeyboardInterrupt" in err)
            return "" if usual else f"exit code {code}: {err}"
        if case.command == "serve" and case.signal == signal.SIGTERM:
            return "" if (code, err) == (0, "") else f"exit code {code}: {err}"
        if code != 130:
            return f"exit code {code}: {err}"
        if not NO_FRAME.fullmatch(err) or "interrupted" not in err:
            return f"not one line: {err}"
        if case.command == "replay" and out:
            return f"stdout: {out}"
        return ""

    def _lost(self, checkpoint):
        """Return the difference of the checkpoint from every state after complete frames; "" if there is none."""
        if not checkpoint.exists() or not any(name.suffix == ".commit" for name in checkpoint.iterdir()):
            return ""
        engine = ps.Engine.restore(checkpoint)
        held = engine.state_hash() == self.states[engine.global_step]
        return "" if held else f"the checkpoint of step {engine.global_step} holds something else"

    def _libraries_of_a_whole_start(self):
        """Command → how many of the slow libraries are mapped when it waits for its input."""
        results = {}
        for command in COMMANDS:
            checkpoint = self.folder / f"whole-{command}"
            process = self.start(command, checkpoint)
            if command == "serve":
                process.stdout.readline()
            else:
                wait_for_a_commit(checkpoint, process)
            results[command] = loaded(process.pid)
            process.kill()
            process.communicate()
        return results


def wait_for_a_commit(checkpoint, process):
    until(lambda: list(checkpoint.glob("*.commit")) or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()


def catches(pid, number):
    """Whether the process has installed a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as status:
            mask = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)


def loaded(pid):
    """How many libraries of pyarrow and jaxlib the process has mapped."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            paths = {line.split(maxsplit=5)[-1] for line in maps if ".so" in line}
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(any(part in path for part in SLOW_LIBRARIES) for path in paths)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=560, help="every eleventh early (default 560)")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="at once (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    args = parser.parse_args()
    began, done = time.monotonic(), []
    numbers = [args.only] if args.only is not None else range(args.first, args.first + args.cases)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-signals-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        for outcome in pool.map(Harness(folder, args.seed).check, numbers):
            done.append(outcome)
            if outcome.problem:
                again = f"python tests/support/faults/signals.py --seed {args.seed} --only {outcome.case.number}"
                print(f"FAILED {outcome.case}: {outcome.problem}\nagain: {again}", flush=True)
            if len(done) % 50 == 0:
                print(f"{len(done)} cases, {time.monotonic() - began:.0f} s", flush=True)
    failed = [outcome for outcome in done if outcome.problem]
    standing = [outcome for outcome in done if not outcome.case.early]
    kinds = Counter(f"{outcome.case.command} {outcome.case.signal.name}" for outcome in standing)
    print(f"{len(standing)} signals to handlers that stand ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}),")
    print(f"  {sum(outcome.loading for outcome in standing)} of them while pyarrow and jaxlib were being loaded")
    codes = Counter(outcome.code for outcome in done if outcome.case.early)
    print(f"{len(done) - len(standing)} earlier: {', '.join(f'{n} with code {code}' for code, n in codes.items())}")
    print(f"{len(done)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
