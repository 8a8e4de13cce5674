"""A pytest plugin: what needs jax or pyarrow is skipped, so that only penstock's own code is watched."""

import importlib.abc
import sys

import pytest


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "pyarrow"):
            pytest.skip(f"imports {name}", allow_module_level=True)


sys.meta_path.insert(0, Refuse())
