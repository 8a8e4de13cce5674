"""Builds broken.pyx with the flags of the environment; run from the root, with --build-temp.

C files go where the objects go, so that builds side by side do not meet.
"""

import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    name="broken",
    long_description="broken on purpose",  # pyproject.toml leaves it to a setup.py
    packages=[],
    py_modules=[],
    ext_modules=cythonize(
        [Extension("broken", ["tests/support/sanitize/broken.pyx"])],
        build_dir=sys.argv[sys.argv.index("--build-temp") + 1],
        compiler_directives={"language_level": 3, "boundscheck": False, "wraparound": False},
    ),
)
