"""Scripts of this repository that are part of no package, as modules."""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def loaded(name):
    """loaded("examples/two_tower.py"): a new module"""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def site_pages():
    """Group → the site's page of its Python names. In a separate process: libraries may get stand-ins."""
    program = "import json, sys; from api_pages import StandIns, pages; "
    program += "sys.meta_path.append(StandIns()); print(json.dumps(pages()))"
    return json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT / "docs"))
