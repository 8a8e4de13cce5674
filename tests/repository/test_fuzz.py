"""A small number of the fuzzer's cases (``make fuzz`` runs thousands), and that the fuzzer sees what it looks for."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from limits import HANG_S

TESTS = Path(__file__).parents[1] / "support"
# The fuzzer forks; an earlier pyarrow crashes where it writes in a child of a process that has imported it.
FORKS = pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 25, reason="needs pyarrow 25, which can write in a fork")


def python(*words):
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *words], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


@pytest.mark.evidence
@FORKS
@pytest.mark.promise("A damaged file ends in a result or in one line")
def test_damaged_input_ends_in_a_result_or_one_line(tmp_path):
    done = python("-m", "fuzz", "--cases", "60", "--no-crafted", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "72 cases, 0 failed" in done.stdout  # with 12 manifests


@pytest.mark.evidence
@FORKS
@pytest.mark.parametrize("name", ["2^17-rows-of-2^10-plain", "bomb-zstd.arrows"])
def test_a_decompression_bomb_does_not_take_the_memory(name, tmp_path):
    done = python("-m", "fuzz", "--only", f"{name}-validate", "--keep", str(tmp_path))
    assert "1 cases, 0 failed" in done.stdout, done.stdout + done.stderr


# What takes the place of a command, and what is wrong with it.
BROKEN = {
    "raise KeyError('no')": "a traceback",
    "import os; os.kill(os.getpid(), 11)": "signal SIGSEGV",
    "import time; time.sleep(600)": "hangs",
    "held = b'1' * (400 << 20); raise ps.InputError('no')": "MiB more",
    "raise ps.StateError('no')": "exit code 5",
    "import sys; print('a\\nb', file=sys.stderr)": "2 lines on stderr",
    "return 3": "without a line",
    "raise ps.InputError('no')": "None",
}


@pytest.mark.evidence
def test_the_fuzzer_sees_what_must_not_be():
    script = f"""
import penstock as ps, penstock.cli.main, sys
from fuzz import server
baseline = server.run(["--version"], {HANG_S}).anon_mib
"""
    for code, problem in BROKEN.items():
        script += f"""
def broken(words, at_once, ending):
    {code}
    return 0
sys.modules["penstock.cli.main"].run = broken
print(server.run(["x"], {1 if problem == "hangs" else HANG_S}).problem(baseline, 256))
"""
    done = python("-c", script)
    for problem, line in zip(BROKEN.values(), done.stdout.splitlines(), strict=True):
        assert problem in line, done.stdout + done.stderr
