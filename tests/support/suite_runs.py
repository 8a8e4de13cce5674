"""``python tests/support/suite_runs.py``: the demo and the tests, on every Python and with other versions of libraries.

pythons   every Python from 3.11 to 3.14 on PATH, of pyenv or in PYTHONS, with the versions of .ci/constraints.txt
versions  the lowest versions that pyproject.toml promises, on the oldest Python; the newest of the index, on the newest

Each case clones HEAD into build/suites, runs ``make demo`` and ``make test`` there as on a fresh machine, and writes
its line of bench/results/suites.md. A case that failed has an exit code in the line; its output stays in the clone.
"""

import argparse
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "suites"
RESULTS = ROOT / "bench" / "results" / "suites.md"
PINNED = ROOT / ".ci" / "constraints.txt"
MINORS = range(11, 15)

# Extras of developers and benchmarks, and of gigabytes: of these, pyproject.toml promises only the versions of CI.
NO_PROMISE = {"bench-peers", "dev", "docs", "tensorflow", "torch", "tpu-aot"}
# Of these the results name the versions.
NAMED = ("jax", "jaxlib", "numpy", "pyarrow", "protobuf", "flax", "keras", "ray")


@dataclass(frozen=True)
class Case:
    """A run of the demo and the tests. constraints : lines for pip; extras : of penstock, besides ``dev``"""

    name: str
    python: str
    constraints: Sequence[str]
    extras: Sequence[str] = ()


def pythons(named: str) -> dict[int, str]:
    """Return minor version → an executable that can make virtual environments. named : paths, separated by colons"""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    executables: dict[int, str] = {}
    for path in candidates(named):
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        major, _, minor = done.stdout.partition(" ")
        if done.returncode == 0 and major == "3" and int(minor) in MINORS:
            executables.setdefault(int(minor), path)
    return dict(sorted(executables.items()))


def candidates(named: str) -> Iterator[str]:
    yield from (shutil.which(path) or path for path in named.split(":") if path)
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in MINORS))
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip()
        yield from (str(path) for path in sorted(Path(root).glob("versions/3.*/bin/python")))


def promises() -> tuple[list[str], list[str]]:
    """Return the lowest versions that pyproject.toml promises, as constraints, and the extras that they belong to."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = settings["project"]["optional-dependencies"]
    extras = sorted(optional.keys() - NO_PROMISE)
    requirements = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    requirements += [requirement for extra in extras for requirement in optional[extra]]
    bounds = [re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", requirement) for requirement in requirements]
    lowest = {match[1]: match[2] for match in bounds if match}
    return [f"{name}=={version}" for name, version in ({"jaxlib": lowest["jax"]} | lowest).items()], extras


def without(constraints: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the constraints of libraries that ``others`` does not name."""
    names = {name_of(line) for line in others}
    return [line for line in constraints if name_of(line) not in names]


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=]", requirement)[0]).lower()


def cases(command: str, executables: dict[int, str]) -> list[Case]:
    pinned = PINNED.read_text().split()
    if command == "pythons":
        return [Case(f"Python 3.{minor}", path, pinned) for minor, path in executables.items()]
    lowest, extras = promises()
    tools = without(pinned, lowest)
    oldest, newest = (executables[choose(executables)] for choose in (min, max))
    return [Case("lowest", oldest, lowest + tools, extras), Case("newest", newest, tools, extras)]


def run(case: Case, pytest_arguments: str) -> tuple[str, bool]:
    """Run a case. Return its line of the results, and whether everything passed."""
    clone = FOLDER / case.name.replace(" ", "-")
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    constraints = clone / "build" / "constraints.txt"
    constraints.parent.mkdir()
    constraints.write_text("\n".join(case.constraints) + "\n")
    variables = [f"PYTHON={case.python}", "CONSTRAINTS=build/constraints.txt"]
    variables.append(f"EXTRAS={','.join(['dev', *case.extras])}")
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH")}
    before, outcomes = cpu_seconds(), []
    for target in ("demo", "test"):
        with open(clone / "build" / f"{target}.log", "w") as log:
            command = ["make", target, *variables, f"ARGS={pytest_arguments}"]
            code = subprocess.run(command, cwd=clone, env=environment, stdout=log, stderr=log, check=False).returncode
        outcomes.append("passes" if code == 0 else f"exit code {code}")
    passed = outcomes == ["passes", "passes"]
    outcomes[1] = ", ".join([counts(clone / "build" / "outcomes" / "test.xml"), *([] if passed else outcomes[1:])])
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=clone, text=True).strip()
    minutes = f"{(cpu_seconds() - before) / 60:.0f}"
    fields = [case.name, *surroundings(clone), *outcomes, minutes, commit, f"{datetime.date.today()}"]
    return f"| {' | '.join(fields)} |", passed


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def counts(junit_file: Path) -> str:
    """Return how many tests passed, failed and were skipped."""
    if not junit_file.exists():
        return "no tests"
    suites = list(ElementTree.parse(junit_file).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = [f"{failures + errors} failed"] if failures + errors else []
    return ", ".join([f"{total - failures - errors - skipped:,} passed", *failed, f"{skipped} skipped"])


def surroundings(clone: Path) -> tuple[str, str]:
    """Return the Python and compiler of a clone, and the versions of its libraries."""
    python = clone / ".venv" / "bin" / "python"
    code = "import platform; print(platform.python_version())"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    compiler = subprocess.run(["cc", "-dumpfullversion"], capture_output=True, text=True, check=False).stdout.strip()
    listing = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    installed = json.loads(subprocess.run(listing, capture_output=True, check=True).stdout)
    versions = {name_of(package["name"]): package["version"] for package in installed}
    named = ", ".join(f"{name} {versions[name]}" for name in NAMED if name in versions)
    return f"{version}, cc {compiler}", named


def record(line: str) -> None:
    """Put a line in the results in place of the line of the same case, or after the last one."""
    lines = RESULTS.read_text().splitlines()
    head = line.split("|")[1]
    places = [number for number, other in enumerate(lines) if other.startswith(f"|{head}|")]
    if places:
        lines[places[0]] = line
    else:
        lines.append(line)
    RESULTS.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("command", choices=("pythons", "versions"))
    parser.add_argument("--only", metavar="CASE", help='such as "Python 3.12" or newest')
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="for pytest, such as '-n 2'")
    args = parser.parse_args()
    executables = pythons(os.environ.get("PYTHONS", ""))
    if missing := [f"3.{minor}" for minor in MINORS if minor not in executables]:
        print(f"no Python {', '.join(missing)} here: name its executable in PYTHONS", file=sys.stderr)
    if not executables:
        return 1
    failed = []
    for case in cases(args.command, executables):
        if args.only in (None, case.name):
            print(f"{case.name}: {case.python}, output in {FOLDER.relative_to(ROOT)}", flush=True)
            line, passed = run(case, args.pytest)
            record(line)
            print(line, flush=True)
            failed += [] if passed else [case.name]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
