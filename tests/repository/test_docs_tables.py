"""The tables of the documentation that are generated from what registers itself in the code."""

import re

import pytest
from scripts import loaded

from penstock.base.events import EVENTS
from penstock.io.delta_format import COLUMNS, DeltaForm, Shape
from penstock.io.sources.source_kinds import source_kinds
from penstock.model.updates import OPTIMIZERS
from penstock.serving.followers.target_kinds import target_kinds

tables = loaded("docs/tables.py")
evidence = loaded("docs/hooks.py").evidence()


@pytest.mark.parametrize("page", tables.TABLES)
def test_generated_tables_are_up_to_date(page):
    assert tables.current(page) == (tables.DOCS / page).read_text(), "run: python docs/tables.py"


def test_every_table_of_evidence_is_on_one_page_and_names_files_that_exist():
    pages = [path.read_text() for path in sorted((tables.DOCS / "evidence").glob("*.md"))]
    assert sorted(re.findall("<!-- docs/evidence.py: (.*) -->", "".join(pages))) == sorted(evidence.TABLES)
    text = "".join(create() for create in evidence.TABLES.values())
    names = set(re.findall(r"`([\w-]+-\d{4}-\d\d-\d\d\.\w+)`", text))
    assert len(names) > 10
    assert [name for name in names if not (evidence.RESULTS / name).exists()] == []
    assert set(re.findall(r"\(plots/(.*)\.svg\)", text)) == evidence.plots().keys()


def test_every_plot_of_evidence_has_a_legend():
    for name, plot in evidence.plots().items():
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", plot)
        marks = re.findall(r'<rect [^>]*width="12" height="(?:3|12)"', plot)
        assert (name, len(marks) > 0, len(texts) > len(marks)) == (name, True, True)


def test_a_missed_aim_is_shown_as_missed():
    rows = {row.split("|")[1].strip(): row.split("|")[4].strip() for row in evidence.aims().splitlines()[2:]}
    assert (rows["w1, coalesce"], rows["w1, sgd"], rows["w1, adagrad"]) == ("yes", "no", "the share")


def test_every_source_and_target_has_its_section():
    for kind in (*source_kinds(), *target_kinds()):
        page, _, anchor = kind.page.partition("#")
        headings = re.findall("^## (.*)$", (tables.DOCS / page).read_text(), re.MULTILINE)
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings], kind.title


def test_the_listed_columns_are_those_of_a_stream_of_deltas():
    form = DeltaForm({"user": Shape(2, {"momenta": 2})}, op=True, numbered=True, dynamic=True, last=True)
    assert form.schema.names == [name for name, *_ in COLUMNS]


def test_the_listed_events_are_those_that_the_code_logs():
    code = "".join(path.read_text() for name in ("engine", "io") for path in (tables.DOCS.parent / name).rglob("*.py"))
    assert set(re.findall(r"(?:\breport\(|FrequentEvent\()\s*\"(\w+)\"", code)) == set(EVENTS)


def test_every_optimizer_is_described_on_its_page():
    text = (tables.DOCS / "optimizers.md").read_text()
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^- \*\*([\w, ]+?)\*\*", text, re.MULTILINE))))
    assert {optimizer.__name__ for optimizer in OPTIMIZERS.values()} <= described
