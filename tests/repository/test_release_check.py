"""``make release-check``: what it accepts and refuses, without building anything."""

import datetime
import tomllib
from email.message import Message

import pytest
import release_check
from scripts import ROOT

import penstock

WHEEL = ["penstock/__init__.py", "penstock/pyx/update.cpython-311.so", "penstock-0.1.0.dist-info/licenses/LICENSE"]
SDIST = [f"penstock-0.1.0/{name}" for name in ("LICENSE", "Makefile", "README.md", "setup.py", "pyx/accumulator.pyx")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def metadata(others=()):
    message = Message()
    fields = {
        "Name": "penstock",
        "Version": penstock.__version__,
        "Summary": PROJECT["description"],
        "License-Expression": "Apache-2.0",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    for name, value in (fields | dict(others)).items():
        message[name] = value
    for name, address in PROJECT["urls"].items():
        message["Project-URL"] = f"{name}, {address}"
    return message


def test_files_of_a_release_are_in_order():
    assert list(release_check.content_problems(WHEEL, SDIST)) == []
    assert list(release_check.metadata_problems(metadata(), PROJECT)) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("penstock/tests/test_engine.py", "the wheel contains penstock/tests/test_engine.py"),
        ("penstock/bench/experiments/ulp.py", "the wheel contains penstock/bench/experiments/ulp.py"),
        ("penstock/bench/tpu/matrix.py", "the wheel contains penstock/bench/tpu/matrix.py"),
        ("penstock/bench/results/reads.txt", "the wheel contains penstock/bench/results/reads.txt"),
        ("penstock/pyx/update.pyx", "the wheel contains penstock/pyx/update.pyx"),
        ("other/__init__.py", "the wheel installs other/__init__.py next to penstock"),
    ],
)
def test_a_file_that_does_not_belong_in_the_wheel_is_a_problem(name, problem):
    assert list(release_check.content_problems([*WHEEL, name], SDIST)) == [problem]


def test_missing_kernels_licences_and_sources_are_problems():
    assert list(release_check.content_problems(WHEEL[:1], SDIST[1:])) == [
        "the wheel has no kernels",
        "the wheel has no LICENSE",
        "the sdist lacks LICENSE",
    ]


def test_metadata_that_differs_from_the_repository_is_a_problem():
    problems = list(release_check.metadata_problems(metadata({"Version": "9.9", "License-Expression": "MIT"}), PROJECT))
    assert problems == [
        "License-Expression is 'MIT', not 'Apache-2.0'",
        "CHANGELOG.md has no section of 9.9",
        "CITATION.cff has another version than 9.9",
    ]


def test_placeholders_and_checks_are_left_to_do_before_a_release(monkeypatch, tmp_path):
    results = tmp_path / "weekly.md"
    monkeypatch.setattr(release_check.weekly, "RESULTS", results)
    results.write_text("| date | commit | outcome | CPU seconds |\n|---|---|---|---|\n")
    project = {"urls": {"Homepage": "https://penstock.invalid", "Source": "https://example.org/penstock"}}
    placeholder = "Homepage is a placeholder: fill in [project.urls] of pyproject.toml"
    checks = "all checks passed {}: make weekly, and commit bench/results/weekly.md"
    assert list(release_check.final_problems("9.9", project)) == [placeholder, checks.format("never")]
    today = datetime.date.today()
    for days, outcome, expected in (
        (9, "all passed", [placeholder, checks.format("9 days ago")]),
        (1, "failed: tsan", [placeholder, checks.format("9 days ago")]),
        (7, "all passed", [placeholder]),
    ):
        with open(results, "a") as lines:
            lines.write(f"| {today - datetime.timedelta(days)} | 12345678 | {outcome} | test 480 |\n")
        assert list(release_check.final_problems("9.9", project)) == expected


def test_the_first_example_is_the_readmes_engine():
    example = release_check.first_example((ROOT / "README.md").read_text())
    assert "engine.apply(" in example
