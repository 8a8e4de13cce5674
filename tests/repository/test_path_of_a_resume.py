"""How much of ``checkpoint/`` a resumed run passes before its first frame."""

import re
import subprocess
import sys
from pathlib import Path

from limits import HANG_S

ROOT = Path(__file__).parents[2]


def test_a_resumed_run_passes_the_modules_and_classes_that_the_architecture_draws():
    """A separate process, because a profiler slows down every thread of this one."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "path_of_a_resume.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    *path, modules, concepts = done.stdout.splitlines()
    assert path[0] == "session: CheckpointSession.run"
    on_path = {kind.partition(": ")[2] for kind in (modules, concepts)}
    assert on_path == drawn(), done.stdout
    assert int(modules.split()[0]) <= 8, modules
    assert int(concepts.split()[0]) <= 8, concepts


def drawn():
    """The modules and the classes of ``checkpoint/`` in the drawing of a resumed run, as the script prints them."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawing = text.partition("\nA resumed run")[2].split("```")[1]
    package = ROOT / "engine" / "checkpoint"
    modules = {name for name in re.findall(r"(\w+)\.py", drawing) if (package / f"{name}.py").exists()}
    source = "".join((package / f"{name}.py").read_text() for name in modules)
    classes = set(re.findall(r"\b[A-Z]\w+", drawing)) & set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    return {", ".join(sorted(names)) for names in (modules, classes)}
