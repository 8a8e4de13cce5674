"""The path of a plain batch from its source into a table has a limited number of modules and stack frames."""

import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S


@pytest.mark.parametrize(("rows", "last"), [(1000, "pipeline:"), (10_000, "bridge.host_tables:")])
def test_a_plain_batch_passes_at_most_20_modules_and_13_stack_frames(rows, last):
    """The limits keep the path short enough to read; ARCHITECTURE.md draws it and states them.

    Raise a limit only if a change needs another module or call on the path, and change the drawing with it. The path is
    measured in a separate process, because the profiler would slow down every thread of this one.
    """
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "path_of_a_batch.py"), str(rows)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (result.returncode, result.stderr) == (0, "")
    *path, modules, stack_frames = result.stdout.splitlines()
    assert path[0].split() == ["1", "engine:", "Engine.run"]
    assert path[-1].split()[1] == last
    assert int(modules.split()[0]) <= 20, modules
    assert int(stack_frames.split()[0]) <= 13, result.stdout
