"""A copy of the repository's files, in which one module at a time is mutated while tests run against the copy."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations.operators import Mutation
from mutations.packages import ROOT


@dataclass(frozen=True)
class TestRun:
    """The end of a run of tests. code : of pytest; None: it reached the limit; failed : the first test that failed"""

    code: int | None
    seconds: float
    failed: str
    output: str


class WorkingCopy:
    """The files of the repository in ``folder``; the compiled kernels are links to those of the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writes = 0
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in filter(None, listed):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        for kernel in [*ROOT.glob("pyx/**/*.so"), *ROOT.glob("bench/*.so")]:
            (folder / kernel.relative_to(ROOT)).symlink_to(kernel)
        shutil.copytree(ROOT / "build" / "tree", folder / "build" / "tree", symlinks=True)  # its links are relative
        self._environment = os.environ | {"PYTHONPATH": str(folder / "build" / "tree"), "PYTHONHASHSEED": "0"}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", "import penstock.core.gate; print(penstock.core.gate.__file__)"]
        imported = subprocess.run(
            command, cwd=folder, env=self._environment, capture_output=True, check=True, text=True
        )
        if not imported.stdout.startswith(str(folder)):
            raise RuntimeError(f"the tests would import {imported.stdout.strip()}, not the copy in {folder}")

    def write(self, path: str, source: bytes) -> None:
        """Replace a module. Its time is new in every write, so that no bytecode of an earlier source is used."""
        self._writes += 1
        (self.folder / path).write_bytes(source)
        moment = time.time() + self._writes
        os.utime(self.folder / path, (moment, moment))

    def test(
        self, tests: Sequence[str], limit_s: float, mutation: Mutation | None = None, evidence: bool = False
    ) -> TestRun:
        """Run tests up to the first failure, with one mutation applied if there is one.

        evidence : those of ``make evidence``, not those of ``make test``
        """
        if mutation is None:
            return self._test(tests, limit_s, evidence)
        source = (self.folder / mutation.path).read_bytes()
        self.write(mutation.path, mutation.applied(source))
        try:
            return self._test(tests, limit_s, evidence)
        finally:
            self.write(mutation.path, source)

    def _test(self, tests: Sequence[str], limit_s: float, evidence: bool) -> TestRun:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        environment = self._environment | ({"PENSTOCK_EVIDENCE": "1"} if evidence else {})
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, "-m", "evidence" if evidence else "not evidence", *tests],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, code = process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            output, code = "", None
        finally:
            _end_session(process)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return TestRun(code, time.monotonic() - started, failed[1] if failed else "", output)


def _end_session(process: "subprocess.Popen[str]") -> None:
    """End the test run and the processes that it has started and left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()
