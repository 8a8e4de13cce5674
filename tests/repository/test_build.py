"""The build of the kernels says how far it is, also where pip captures its output."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import Cython.Build
import pytest
import setuptools
from scripts import ROOT
from setuptools.command.build_ext import build_ext


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


def test_an_editable_installation_compiles_on_every_cpu(setup_arguments):
    distribution = setuptools.Distribution({name: setup_arguments[name] for name in ("cmdclass", "ext_modules")})
    distribution.get_command_obj("build_ext")
    command = distribution.reinitialize_command("build_ext")  # as setuptools does for an editable installation
    command.ensure_finalized()
    assert command.parallel == os.cpu_count()


def test_make_shows_the_progress_of_what_pip_builds():
    done = subprocess.run(["make", "-n", "-B", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    (install,) = [line for line in done.stdout.splitlines() if " pip install " in line]
    tools, penstock = install.split(" && ")
    assert tools.endswith(" --upgrade cython setuptools")
    assert penstock.startswith("PENSTOCK_PROGRESS=/proc/$$/fd/2 .venv/bin/python -m pip install -q ")


@pytest.mark.parametrize("editable", [True, False])
def test_an_editable_installation_compiles_where_a_build_in_place_does(editable, setup_arguments, monkeypatch):
    monkeypatch.setattr(build_ext, "run", lambda _: None)
    distribution = setuptools.Distribution({"ext_modules": setup_arguments["ext_modules"]})
    command = setup_arguments["cmdclass"]["build_ext"](distribution)
    command.editable_mode, command.inplace = editable, True
    command.build_lib, command.build_temp = "removed/lib", "removed/temp"
    command.run()
    folders = {Path(command.build_lib).parent, Path(command.build_temp).parent}
    assert folders == {Path("build" if editable else "removed")}


def test_an_sdist_of_the_same_files_has_the_same_bytes(setup_arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    archives = []
    for number, names in enumerate((["b.py", "a.py"], ["a.py", "b.py"])):
        folder = tmp_path / str(number) / "penstock-1"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("pass\n")
            os.utime(folder / name, (number, number))
        monkeypatch.chdir(folder.parent)
        command = setup_arguments["cmdclass"]["sdist"](setuptools.Distribution())
        archives.append(Path(command.make_archive("penstock-1", "gztar", base_dir="penstock-1")).read_bytes())
    assert archives[0] == archives[1]
