"""``make pythons`` and ``make versions``: which Pythons and versions they run, and what they record."""

import tomllib

import newest
import pytest
import suite_runs

JUNIT = """<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>"""


def executable(folder, name, version):
    """A file that answers as the Python of that version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{version}"\n')
    path.chmod(0o755)
    return str(path)


def test_pythons_are_on_the_path_in_pyenv_or_named(tmp_path, monkeypatch):
    on_path = executable(tmp_path / "bin", "python3.12", "3 12")
    executable(tmp_path / "bin", "python3.11", "")  # a shim of pyenv, without a version
    in_pyenv = executable(tmp_path / "root" / "versions" / "3.13.1" / "bin", "python", "3 13")
    executable(tmp_path / "root" / "versions" / "3.10.1" / "bin", "python", "3 10")
    executable(tmp_path / "bin", "pyenv", tmp_path / "root")
    named = executable(tmp_path / "elsewhere", "python", "3 14")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert suite_runs.pythons(named) == {12: on_path, 13: in_pyenv, 14: named}


def test_the_lowest_case_has_every_lower_bound_of_pyproject():
    constraints, extras = suite_runs.promises()
    optional = tomllib.loads((suite_runs.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"jax", "jaxlib", "numpy", "pyarrow", "protobuf", "flax", "keras", "ray", "cython"} <= {
        line.partition("==")[0] for line in constraints
    }
    assert optional.keys() == {*extras, *suite_runs.NO_PROMISE}


def test_the_newest_case_pins_only_tools():
    lowest, newest_case = suite_runs.cases("versions", {11: "python3.11", 14: "python3.14"})
    assert (lowest.python, newest_case.python) == ("python3.11", "python3.14")
    assert not {line.partition("==")[0] for line in newest_case.constraints} & set(suite_runs.NAMED)
    assert any(line.startswith("pytest==") for line in newest_case.constraints)
    assert len({suite_runs.name_of(line) for line in lowest.constraints}) == len(lowest.constraints)


def test_a_case_replaces_its_line_of_the_results(tmp_path, monkeypatch):
    results = tmp_path / "suites.md"
    results.write_text("# Title\n\n| case | tests |\n|---|---|\n| lowest | 1 |\n| newest | 2 |\n")
    monkeypatch.setattr(suite_runs, "RESULTS", results)
    suite_runs.record("| lowest | 3 |")
    suite_runs.record("| Python 3.12 | 4 |")
    assert results.read_text().splitlines()[4:] == ["| lowest | 3 |", "| newest | 2 |", "| Python 3.12 | 4 |"]


def test_failures_and_errors_are_counted(tmp_path):
    (tmp_path / "test.xml").write_text(JUNIT)
    assert suite_runs.counts(tmp_path / "test.xml") == "4 passed, 2 failed, 3 skipped"
    assert suite_runs.counts(tmp_path / "missing.xml") == "no tests"


@pytest.mark.parametrize("installed", ["1.0", "0.9", ""])
def test_versions_that_are_installed_are_not_tested_again(installed, monkeypatch, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(newest, "newest", lambda: {"jax": "1.0"})
    monkeypatch.setattr(newest, "installed", lambda _: installed)
    monkeypatch.setattr(newest.subprocess, "run", run)
    assert newest.main() == 0
    if installed == "1.0":
        assert not commands
        assert capsys.readouterr().out == "newest of the index, and tested: jax 1.0\n"
    else:
        assert commands[0][-1] == "jax==1.0"
        assert "pytest" in commands[1]
