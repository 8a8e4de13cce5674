"""Scripts of this repository that are part of no package, as modules."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def loaded(name):
    """loaded("examples/two_tower.py"): a new module"""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
