"""A pytest plugin: what needs jax, pyarrow or a process is skipped, so that only penstock's own code is watched."""

import importlib.abc
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from scripts import recorded

# Watched code is several times as slow.
settings.register_profile("sanitize", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("sanitize")


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "pyarrow"):
            pytest.skip(f"imports {name}", allow_module_level=True)


sys.meta_path.insert(0, Refuse())


class NoProcess(subprocess.Popen):
    def __init__(self, *_, **__):
        pytest.skip("starts a process")

    def __del__(self):
        """Do nothing: there is none."""


subprocess.Popen = NoProcess


@pytest.fixture(name="mesh_of")
def _mesh_of():
    pytest.skip("its meshes are of jax's devices")


@pytest.fixture(name="ulp")
def _ulp():
    pytest.skip("its rules are applied by jax")


@pytest.fixture
def shared():
    """As in tests/conftest.py, which imports jax."""
    return recorded
