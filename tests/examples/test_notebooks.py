"""The notebooks of examples/: their cells run in order, and show what the files say that they show."""

import json
import re

import pytest
from notebooks import code_cells, executed
from scripts import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def comparable(text):
    """What a cell shows, without times, the identity of a service, and the places of a plot's elements."""
    if text.startswith("<svg"):
        return re.sub(r"[\d.]+", "", text)
    text = re.sub(r"(seconds|rows_per_s)(=|<td>)[\d.,e-]+", r"\1\2", text)
    return re.sub(r"\b[0-9a-f]{16}-", "", text)


def texts(outputs):
    shown = [{"stream": output["text"]} if "text" in output else output["data"] for output in outputs]
    return [{kind: comparable("".join(lines)) for kind, lines in data.items()} for data in shown]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_file_says(path):
    cells = code_cells(json.loads(path.read_text()))
    shown = [texts(outputs) for outputs in executed(path)]
    assert shown == [texts(cell["outputs"]) for cell in cells], f"python tests/support/notebooks.py {path}"
    assert len([cell for cell in cells if cell["outputs"]]) > len(cells) / 2


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["rollback", "train_and_inspect"]
