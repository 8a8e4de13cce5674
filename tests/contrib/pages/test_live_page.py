"""``--ui``: the page as a browser shows it. Chromium is asked for real; without one these tests are skipped."""

import json
import re
import urllib.request

import cli
import pyarrow as pa
import pytest
from browser import WIDTHS
from cli import started, table
from limits import HANG_S, until

from penstock.contrib.pages.monitoring import page_text

CONFIG = table() + table("<b>item") + "mode: TRAINING\n"


def test_the_live_page_needs_no_other_file():
    page = page_text().replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"""(src|href)=|@import|url\(|//[a-z]+\.[a-z]""", page)
    assert ".innerHTML" not in page  # names of tables are others' words


@pytest.fixture
def replaying(config):
    """A replay in mid-stream: three workers' frames for eleven steps are in, a stale one, two of the next; it waits."""
    words = ["replay", config, "-", "--num-required", "3", "--on-bad-row", "drop", "--ui"]
    with started(*words) as command:
        url = command.stderr.readline().decode().split()[1]
        writer = pa.ipc.new_stream(command.stdin, frame(0).schema)
        for number in range(36):
            writer.write_batch(frame(number // 3, number % 3))
            if number == 32:
                writer.write_batch(frame(0, 9))
        command.stdin.flush()
        until(lambda: live(url)["metrics"]["penstock_frames_total"] == 36)
        yield url
        writer.close()
        command.stdin.close()
        assert command.wait(HANG_S) == 0


def frame(step, worker=0):
    names = pa.array(["user", "user", "user", "<b>item", "user"])
    values = pa.array([[1.0, 1.0]] * 5, pa.list_(pa.float32(), 2))
    return cli.frame(step, [7, 7, 7, 3, 99], contributor=pa.array([worker] * 5), table=names, gradient=values)


def live(url):
    with urllib.request.urlopen(url + "live.json", timeout=HANG_S) as answer:
        return json.load(answer)


def test_live_json_has_the_values_of_the_page(replaying):
    live_values = live(replaying)
    assert live_values["metrics"]["penstock_required_frames"] == 3
    assert live_values["metrics"]["penstock_stale_lateness_frames_total"] == {"16": 1}
    assert live_values["hot"][0][:2] == ["user", "7"]
    assert live_values["hot"][0][2] == 1.0
    assert live_values["tables"] == ["user", "<b>item"]
    norms = [moment["norms"]["user"] for moment in live_values["moments"] if "user" in moment["norms"]]
    assert all(0 < norm < 1 for norm in norms)
    assert norms
    assert "got 99" in live_values["errors"][0]


def test_chromium_renders_the_live_page(replaying, browser):
    page = browser.open(replaying)
    # A curve breaks where nothing arrived for long, and is circles if no two of its points are neighbours then.
    page.until("document.body.dataset.ready === 'yes' && document.querySelectorAll('polyline, circle').length >= 2")
    assert page.value("document.getElementById('state').textContent") == "live"
    assert "of 3 frames in" in page.text
    assert "rows, id_out_of_range" in page.text
    assert re.search(r"frames, 9 to 16 steps late\s+1", page.text)
    assert "<b>item" in page.text  # shown as text, not obeyed
    assert re.search(r"user\s+7\s+100 %", page.text)
    assert re.search(r"an optimizer step takes [\d.]+ [mµ]s", page.text)
    assert page.errors == []


# ---- at any width, with odd data

# In place of the command: the page asks for its data once, and never again.
FETCH = "<script>window.fetch = async () => ({ json: async () => (%s) }); window.setTimeout = () => 0;</script>"


@pytest.fixture
def shown(tmp_path, browser):
    """shown(live_values, width): a tab with the page of these values"""

    def show(live_values, width, dark=False):
        page = page_text().replace("<script>", FETCH % json.dumps(live_values) + "<script>", 1)
        file = tmp_path / f"page{width}.html"
        file.write_text(page.replace("history.replaceState", "(() => 0)"), encoding="utf-8")
        tab = browser.open(file, width, dark)
        tab.until("document.body.dataset.ready === 'yes'")
        return tab

    return show


def moment(step, norms=(), seconds=None):
    return {"seconds": step / 10 if seconds is None else seconds, "step": step, "rows": 10 * step, "norms": dict(norms)}


@pytest.fixture
def values(replaying):
    return live(replaying)


@pytest.mark.evidence
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_window(values, width, shown):
    values["title"] = "penstock replay " + "a_long_name_without_a_space" * 8
    values["tables"] = ["user", "table_" + "x" * 80]
    values["hot"] = [["table_" + "x" * 80, "18446744073709551615", 0.5], ["user", "7", 0.25], ["user", "8", 0.1]]
    page = shown(values, width, dark=width == WIDTHS[0])
    assert page.overflow <= 0
    assert re.search(r"18446744073709551615\s+50.0 %", page.text)


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("moments", "lines", "dots"),
    [
        ([], 0, 0),
        ([moment(1, {"user": 0.1})], 0, 1),
        # One interval of flow is a dot too. The norms of a table have dots, and a line if there are two of them.
        ([moment(1, {"user": 0.1}), moment(2, {"user": 0.2})], 1, 3),
        # No rows of a table in a sampled step break its line; a step without samples does not.
        ([moment(1, {"a": 1, "b": 1}), moment(2), moment(3, {"b": 1}), moment(4, {"a": 1, "b": 1})], 2, 5),
        # Nothing arrived for an hour: two lines of the flow, and not one across.
        ([moment(s, seconds=s if s < 4 else 3600 + s) for s in range(8)], 2, 0),
    ],
)
def test_one_sample_is_a_dot_and_a_line_breaks_where_nothing_arrived(values, moments, lines, dots, shown):
    values["tables"] = ["user", "a", "b"]
    page = shown(values | {"moments": moments}, 1280)
    assert (page.count("polyline"), page.count("circle")) == (lines, dots)


@pytest.mark.evidence
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_replica_shows_its_lookups(values, width, shown):
    names = ("looked_up_rows_total", "lookups_total", "connections", "calls", "refused_calls_total")
    metrics = values["metrics"] | {f"penstock_{name}": number for number, name in enumerate(names, start=41)}
    page = shown({"title": "penstock serve tables", "metrics": metrics}, width)
    assert page.overflow <= 0
    assert re.search(r"41\s+rows looked up\s+42\s+lookups", page.text)
    assert "Gate" not in page.text
