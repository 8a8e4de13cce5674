"""Scripts of this repository that are part of no package, as modules."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def block(page, language):
    """The code of a language on a page of docs/, which has one block of it."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    return code


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
