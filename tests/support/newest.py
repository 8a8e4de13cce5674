"""``python tests/support/newest.py``: tests of the bridge and of configurations, with the newest versions of the index.

Only the libraries whose newest version is another than the installed one are installed, into build/newest; if there are
none, nothing is tested twice. `make versions` runs all tests with them.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "newest"
PIP = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
# The programs that jax compiles, what Arrow hands over, and protobuf: about 30 CPU seconds.
BRIDGE = ("bridge", "devices", "host_updates", "placement", "row_slots", "stacks")
TESTS = (*(f"tests/rows/bridge/test_{name}.py" for name in BRIDGE), "tests/model/config")


def newest() -> dict[str, str]:
    """Return package → the version that pip would install now, of what penstock requires, directly or indirectly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = [*PIP, "--dry-run", "--ignore-installed", "--report", "-", *project["dependencies"]]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    packages = (install["metadata"] for install in report["install"])
    return {package["name"]: package["version"] for package in packages}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> int:
    versions = newest()
    others = [f"{name}=={number}" for name, number in sorted(versions.items()) if installed(name) != number]
    if not others:
        print(f"newest of the index, and tested: {', '.join(f'{name} {versions[name]}' for name in sorted(versions))}")
        return 0
    print(f"newer than the tested versions: {', '.join(others)}", flush=True)
    subprocess.run([*PIP, "--upgrade", "--no-deps", "--target", str(FOLDER), *others], check=True)
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", *TESTS], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
