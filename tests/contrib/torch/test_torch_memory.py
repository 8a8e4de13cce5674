"""The memory of a training step: the distinct rows of its batch and their gradients, and nothing of a table's size."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from scripts import ROOT


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_step_takes_the_memory_of_its_rows_and_their_gradients():
    """The table has five times the rows of a batch. The first steps also allocate the buffers of the engine's sums,
    which stay, and pages of the table."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    script = ROOT / "tests" / "support" / "torch_step_memory.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    growths = [float(line) for line in done.stdout.split()]
    assert all(1.5 < growth < 2.4 for growth in growths[2:]), growths
