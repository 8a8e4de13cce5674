"""Builds broken.pyx and fake_xla.pyx with the flags of the environment; run from the root."""

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    name="broken",
    packages=[],
    py_modules=[],
    ext_modules=cythonize(
        [
            Extension("broken", ["tests/sanitize/broken.pyx"]),
            Extension("fake_xla", ["tests/sanitize/fake_xla.pyx"], include_dirs=["pyx"]),
        ],
        build_dir="build/broken",
        compiler_directives={"language_level": 3, "boundscheck": False, "wraparound": False},
    ),
)
