"""setup.py: the build says how far it is, also where pip captures its output, and links in README become absolute."""

import re
import runpy
import tomllib

import Cython.Build
import pytest
import setuptools
from scripts import ROOT
from setuptools.command.build_ext import build_ext

import penstock


@pytest.fixture
def setup_arguments(monkeypatch):
    """The arguments of setup() in setup.py, which builds nothing."""
    arguments = {}
    monkeypatch.setattr(Cython.Build, "cythonize", lambda extensions, **_: extensions)
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: arguments.update(keywords))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_the_build_says_how_many_kernels_are_compiled(setup_arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(build_ext, "build_extension", lambda *_: None)
    command = setup_arguments["cmdclass"]["build_ext"](setuptools.Distribution())
    command.extensions = setup_arguments["ext_modules"][:3]
    for place in (None, tmp_path / "missing" / "folder", tmp_path / "progress"):
        if place is not None:
            monkeypatch.setenv("PENSTOCK_PROGRESS", str(place))
        command.num_done = 0
        for extension in command.extensions:
            command.build_extension(extension)
    lines = (tmp_path / "progress").read_text().splitlines()
    names = [extension.name.removeprefix("penstock.") for extension in command.extensions]
    expected = [f"compiled {number} of 3 kernels: {name} in 0.0 s" for number, name in enumerate(names, 1)]
    assert [re.sub(r"[\d.]+ s$", "0.0 s", line) for line in lines] == expected


def test_the_page_of_a_package_index_links_to_the_site_and_the_source(setup_arguments):
    links = re.findall(r"\]\(([^)]*)\)", setup_arguments["long_description"])
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    site = f"{urls['Documentation']}/{penstock.__version__}"
    pages = ("pictures/gradient.svg", "explanation/determinism/", "get_started/", "")
    assert {f"{site}/{page}" for page in pages} <= {*links}
    assert f"{urls['Source']}/ARCHITECTURE.md" in links
    assert [link for link in links if not link.startswith("https://") or ".md/" in link or "//" in link[8:]] == []
