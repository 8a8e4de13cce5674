"""Scripts of this repository that are part of no package, as modules."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def block(page, language, heading=""):
    """The code of a language on a page of docs/, or below a heading of it, where one block of it is."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return code


def loaded(name):
    """loaded("examples/two_tower.py"): a new module"""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(name):
    """A file of the recorded results next to a development checkout; without it, the test is skipped."""
    path = ROOT.parent / "shared" / name
    return (
        path if path.exists() else pytest.skip(f"{name}: the recorded results are only next to a development checkout")
    )


def listed_names():
    """Module → the names that the pages in docs/reference/ list, each with its documentation."""
    listed = {}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for module, options in re.findall(r"^::: (\S+)\n((?: .*\n)+)", page.read_text(), re.MULTILINE):
            members = re.search(r"members: \[([^\]]+)\]", options)[1]
            listed.setdefault(module, []).extend(members.replace(",", "").split())
    return listed
