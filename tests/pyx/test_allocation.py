"""Where memory runs out inside an accumulator nothing is half applied, and the next call works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support" / "sanitize"
COMPILER = shutil.which(os.environ.get("CC", "cc"))


@pytest.mark.evidence
@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler and LD_PRELOAD")
def test_every_allocation_that_fails_is_a_memory_error_and_nothing_else(tmp_path):
    library = tmp_path / "failing_malloc.so"
    source = str(HERE / "failing_malloc.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), source], check=True)
    path = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    # PYTHONMALLOC: the pools of Python's own objects are mapped whenever one is full, which would be counted.
    settings = {"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(
        [sys.executable, str(HERE / "allocations.py")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    failed = re.match(r"(\d+) allocations failed", done.stdout)
    assert failed is not None
    assert int(failed[1]) >= 30
