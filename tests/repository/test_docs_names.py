"""Every name of the package that a page mentions exists."""

import importlib
import re
from pathlib import Path

import pytest

import penstock as ps
from penstock.contrib.functional import EmbeddingTables
from penstock.serving.flight import Client

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in path.parts]
# Keys of metadata and names of spans, which are spelled like modules.
KEYS = {
    "batch",
    "closed",
    "commit",
    "crc",
    "delta_stream",
    "dims",
    "end",
    "full_copy",
    "json",
    "log",
    "rows",
    "run",
    "start",
    "step",
    "table",
    "target",
    "version",
}
KEYS |= {"NAME"}  # a placeholder
CLASSES = {"Client": Client, "EmbeddingConfig": ps.EmbeddingConfig, "EmbeddingTables": EmbeddingTables}
CLASSES |= {"Engine": ps.Engine, "engine": ps.Engine}


def resolves(name):
    """Return whether a dotted name is a module, or an attribute of one. A module whose library is missing counts."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("penstock"):
                return True
            continue
        except ps.UsageError:  # it names the extra to install
            return True
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value is not None
    return False


def mentioned(path):
    """Return (dotted names below penstock, (class, attribute) pairs) of the inline code of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    names = {match.rstrip(".") for match in re.findall(r"`(?:ps|penstock)\.([A-Za-z_][\w.]*)", text)}
    attributes = set(re.findall(rf"`({'|'.join(CLASSES)})\.([a-z_]\w*)", text))
    return names, attributes


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_on_a_page_exists(path):
    names, attributes = mentioned(path)
    unknown = {name for name in names if name not in KEYS and not resolves(f"penstock.{name}")}
    instance = (ROOT / "engine" / "api" / "engine.py").read_text()  # attributes that the constructor sets
    unknown |= {
        f"{kind}.{name}"
        for kind, name in attributes
        if not hasattr(CLASSES[kind], name) and f"self.{name}" not in instance
    }
    assert unknown == set()
