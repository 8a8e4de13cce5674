"""Runs the command line in forked children of a process that has imported everything, one line of JSON per case.

A case has "argv" and may have "fault" (the name of a kind of operations and its arguments), "kill_after_calls" of file
operations and "kill_after_s" from there, and "limit_bytes" (of any file). The answer has the exit "code" (-9 where it
was killed), the "calls" of file operations, "out", "err" and "seconds".
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet  # noqa: F401

import penstock.cli.replay  # noqa: F401
from penstock.base.filesystem import atomic_files
from penstock.checkpoint import incremental

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import operations
from forked import become_command


def child(case, out, err, calls):
    """The command, in this process and to its end."""
    incremental.COPYING_FRACTION = 1e9  # a block after every frame: as many commits as the steps allow
    kind, *arguments = case.get("fault") or ["Watched"]
    atomic_files.operations = getattr(operations, kind)(*arguments)
    atomic_files.operations.seen_by = calls
    if case.get("limit_bytes"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["limit_bytes"], case["limit_bytes"]))
    become_command(case["argv"], out, err)


def run(case):
    """Fork, wait or kill, and tell."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as calls:
        started = time.monotonic()
        number = os.fork()
        if not number:
            child(case, out.fileno(), err.fileno(), calls.fileno())
        if "kill_after_s" in case and not wait_for(number, calls, case):
            os.kill(number, signal.SIGKILL)
        _, status = os.waitpid(number, 0)
        return answer(os.waitstatus_to_exitcode(status), out, err, calls, started)


def wait_for(number, calls, case):
    """Until so many file operations have begun, and then so many seconds. True where the child has ended meanwhile."""
    moment = None
    while moment is None or time.monotonic() < moment:
        if os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        if moment is None and os.pread(calls.fileno(), 1 << 16, 0).count(b"\n") >= case["kill_after_calls"]:
            moment = time.monotonic() + case["kill_after_s"]
        time.sleep(0.001)
    return False


def answer(code, out, err, calls, started):
    texts = []
    for file in (out, err, calls):
        file.seek(0)
        texts.append(file.read().decode())
    return {
        "code": code,
        "calls": texts[2].split(),
        "out": texts[0],
        "err": texts[1],
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # jax's, about forks: the child is what makes the devices
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
