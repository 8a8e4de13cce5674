"""What a notebook shows: Report, Engine, EmbeddingConfig, deltas and plans as tables, whose texts are text."""

import re
from html.parser import HTMLParser

import pyarrow as pa
import pytest
from batches import batch
from dynamic import churning_steps, log_of
from dynamic import config_of as dynamic_config
from engines import config_of
from services import client_of, service_of

import penstock as ps
from penstock.api.planning.choices import all_choices
from penstock.api.planning.planner import Planner, reading
from penstock.io.decoding.reader import FrameReader
from penstock.model.updates import WITHOUT_FORMULA
from penstock.serving.flight.answers import Delta

NAME = "<script>&'\""


class Tables(HTMLParser):
    """The tables that a browser shows: rows of cells. kinds : of all elements"""

    def __init__(self, text):
        super().__init__()
        self.tables, self.kinds, self.attributes = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.kinds.add(tag)
        self.attributes += attributes
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_data(self, text):
        if self.tables[-1]:  # else a caption
            self.tables[-1][-1][-1] += text


def shown(value):
    """The tables of a value in a notebook; its elements have no attribute, so no colour that a theme lacks."""
    parsed = Tables(value._repr_html_())
    assert parsed.kinds <= {"table", "caption", "tr", "th", "td"}
    assert parsed.attributes == []
    return parsed.tables


@pytest.fixture
def engine():
    return ps.Engine(config_of(tables=(NAME, "item"), rows=2000), num_required=1)


def test_a_report_shows_its_counts_and_tables(engine):
    log = pa.table({"table": [NAME] * 3, "step": [1, 1, 0], "id": [5, 3, 5], "gradient": [[1.0, 2.0]] * 3})
    engine.gate.set_global_step(1)
    report = engine.run(log, on_bad_row="drop")
    counts, tables = shown(report)
    counts = dict(counts)
    assert {name: counts[name] for name in ("rows", "stale", "global_step")} == {
        "rows": "3",
        "stale": "1",
        "global_step": "2",
    }
    assert "not_finite" not in counts
    assert "1 of 2 frames was stale" in counts["notes"]
    variant = report.variants[NAME]
    assert tables == [["table", "rows", "distinct", "variant"], [NAME, "2", "2", variant], ["item", "0", "0", variant]]


def test_a_report_shows_keys_and_unknown_values_are_empty():
    config = dynamic_config(ps.Dynamic(evict="lru"), rows=64)
    report = ps.Engine(config).run([log_of(churning_steps(160))])
    _, (head, row) = shown(report)
    keys = report.tables["user"].keys
    cells = dict(zip(head, row, strict=True))
    assert (cells["keys"], cells["evicted"]) == (f"{keys.keys:,}", f"{keys.evicted:,}")
    assert keys.evicted > 0


def test_an_engine_and_its_configuration_show_tables_with_optimizers(engine):
    engine.apply({})
    state, tables = shown(engine)
    assert state[1][:3] == ["1", "0", "1"]
    assert tables[1] == [NAME, "2,000", "2", "SGD", "1"]
    assert shown(engine.config) == [tables]
    scheduled = ps.EmbeddingConfig.from_tables([ps.TableConfig(8, 2, name="user")], ps.SGD(lambda step: 0.1))
    assert shown(scheduled)[0][1][-1] == "dynamic"


@pytest.mark.parametrize("algorithm", [*sorted(WITHOUT_FORMULA), "user_defined_program"])
def test_a_configuration_that_cannot_run_is_shown_too(algorithm):
    message = config_of(tables=("user",)).to_proto()
    getattr(message.table_descriptor[0].optimization_parameters, algorithm).SetInParent()
    config = ps.EmbeddingConfig.from_proto(message)
    with pytest.raises(ps.ConfigError):
        _ = config.tables
    assert shown(config)[0][1][:3] == ["user", "10", "2"]


def test_a_delta_shows_its_version_tables_and_first_rows():
    engine = ps.Engine(config_of(tables=(NAME, "item"), dim=12, rows=2000))
    with service_of(engine) as service, client_of(service) as client:
        before = client.table(NAME).version
        client.put([batch(range(1000, 1020), [[0.5] * 12] * 20, table=NAME)], "w")
        (delta,) = client.deltas(before)
    summary, first = shown(delta)
    assert summary[1] == [str(delta.version), "0", f"{NAME} 20"]
    assert first[0] == ["table", "id", "row"]
    assert [row[:2] for row in first[1:]] == [[NAME, str(number)] for number in range(1000, 1005)]
    assert first[1][2].endswith(", … 2 more")
    assert shown(Delta(0, delta.version, ()))[0][1][2] == ""


def test_a_plan_shows_a_row_per_choice_as_the_command_prints_it():
    config = dynamic_config(ps.Dynamic(evict="lru"), rows=64)
    planner = Planner(config, all_choices([64, 128], {}, {}))
    planner.run(FrameReader([log_of(churning_steps(20))], reading(config)))
    ((head, *rows),) = shown(planner)
    assert head[:3] == ["table", "capacity", "min count"]
    assert [row[:2] for row in rows] == [["user", "64"], ["user", "128"]]
    evicted = [forecast.tables()["user"].report.evicted for forecast in planner.forecasts]
    assert [row[head.index("evicted")] for row in rows] == [f"{number:,}" for number in evicted]


def test_the_plain_text_has_no_html(engine):
    assert not re.search("<t[rhd]", f"{engine!r}{engine.config!r}{engine.run([])!r}")
