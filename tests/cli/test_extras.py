"""Without the libraries of the extras metrics and completion: what needs one says how to install it."""

import importlib
import re
import subprocess
import sys

import pytest
from cli import ONE_TABLE, frame
from ipc import write

from penstock.cli import doctor, main

CONFIG = ONE_TABLE
LIBRARIES = {"prometheus_client": "metrics", "shtab": "completion"}
METRICS = "needs the package prometheus_client: pip install 'penstock[metrics]'"


@pytest.fixture
def replay(config, tmp_path):
    """The words of a replay."""
    return "replay", str(config), str(write(tmp_path / "log.arrows", [frame(None, [1, 2, 1])]))


@pytest.fixture
def without(monkeypatch):
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, None)


@pytest.mark.parametrize("flags", [("--ui",), ("--metrics", "127.0.0.1:0"), ("--metrics-file", "m"), ("--report", "p")])
def test_a_flag_that_shows_metrics_says_what_to_install(flags, replay, without, refused):
    assert refused(2, *replay, *flags) == f"penstock: {flags[0]}: {METRICS}\n"
    assert refused(2, "serve", replay[1], "--ui") == f"penstock: --ui: {METRICS}\n"


def test_completion_says_what_to_install(without, refused):
    line = "penstock: completion: needs the package shtab: pip install 'penstock[completion]'\n"
    assert refused(2, "completion", "bash") == line


@pytest.mark.parametrize(
    ("library", "module"),
    [
        ("torch", "penstock.torch"),
        ("keras", "penstock.functional.keras_embedding"),
        ("flax", "penstock.functional.nnx_embedding"),
    ],
)
def test_the_modules_of_a_framework_say_what_to_install(library, module, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    line = f"{module} needs the package {library}: pip install 'penstock[{library}]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(line)):
        importlib.import_module(module)


def test_an_engine_and_a_service_load_no_torch():
    code = (
        "import sys, penstock as ps, penstock.serving.service.server, penstock.io.flight\n"
        "ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(5, 2, optimizer=ps.SGD(0.1))]))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def code(*words):
    return (
        f"import sys; sys.modules.update({dict.fromkeys(LIBRARIES)}); from penstock.cli import main; "
        f"assert main({list(words)}) == 0"
    )


def test_a_replay_and_a_service_need_neither(replay):
    subprocess.run([sys.executable, "-c", code(*replay)], check=True, capture_output=True)
    subprocess.run([sys.executable, "-c", code("demo", "--dir", f"{replay[1]}-demo")], check=True, capture_output=True)


def test_a_missing_library_that_every_engine_needs_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)  # importing it raises ModuleNotFoundError

    def run(args, out):
        import pyarrow.fs  # noqa: F401

    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 1
    line = capsys.readouterr().err
    assert line == "penstock: import of pyarrow.fs halted; None in sys.modules: pip install penstock\n"
