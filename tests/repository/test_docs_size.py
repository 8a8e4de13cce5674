"""The user's set of pages stays one that a user reads to the end, and every how-to begins with its end."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Pages made from docstrings and the code, and of results; and those for who changes penstock.
GENERATED, DECISIONS = ("reference/", "evidence/"), "decisions/"
NAMES = {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
_, _, NAV = (ROOT / "mkdocs.yml").read_text().partition("\n  - How to:\n")
HOW_TO = re.findall(r"^      - (\S+\.md)$", NAV.partition("\n  - Tables:\n")[0], re.MULTILINE)
MOST_LINES = 135


def written_words(path):
    """The number of words of a page that docs/tables.py has not written."""
    text = re.sub(r"<!-- (docs/tables.py [\w ]+): begin -->.*?<!-- \1: end -->", "", path.read_text(), flags=re.DOTALL)
    return len(text.split())


def test_the_users_set_has_at_most_45_pages_and_40000_words():
    pages = [name for name in NAMES if not name.startswith((*GENERATED, DECISIONS))]
    words = sum(written_words(NAMES[name]) for name in pages)
    assert (len(pages) <= 45, words <= 40_000) == (True, True), (len(pages), words)


def test_the_readme_has_at_most_700_words_and_a_decision_400():
    assert len((ROOT / "README.md").read_text().split()) <= 700
    decisions = {name: written_words(path) for name, path in NAMES.items() if name.startswith(DECISIONS)}
    assert 10 <= len(decisions) - 1 <= 12  # and their index
    assert {name: words for name, words in decisions.items() if words > 400} == {}


@pytest.mark.parametrize("page", HOW_TO)
def test_a_how_to_begins_with_what_you_have_at_its_end_and_fits_three_screens(page):
    title, text = NAMES[page].read_text().split("\n\n", 1)
    assert title.startswith("# ")
    assert text.startswith("At the end, ")
    assert len(title.splitlines()) + len(text.splitlines()) < MOST_LINES
