"""``--report``: pages that need nothing else, with the numbers behind them."""

import json
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from browser import WIDTHS
from cli import frame, table
from ipc import write

from penstock.cli import main
from penstock.contrib.pages.html_report import covered, flow_of, frequencies, norms_of
from penstock.contrib.pages.id_statistics import IdUses
from penstock.contrib.pages.svg import lines
from penstock.core.sampling import Moment

CONFIG = table(rate="dynamic { tag: 0 }") + "mode: TRAINING\n"


@pytest.fixture
def files(config, tmp_path):
    """A configuration and a log: user 7 is in half of the rows, one row in ten is bad."""
    rng, batches = np.random.default_rng(0), []
    for number in range(30):
        ids = np.where(np.arange(40) % 2, 7, rng.integers(0, 50, 40))
        ids[0] = 99 if number % 10 == 0 else 3
        rates = pa.array([[0.5 / (1 + number)]] * 40, pa.list_(pa.float32()))
        batches.append(frame(None, ids, number, learning_rates=rates))
    return [str(config), write(tmp_path / "log.arrows", batches)]


def page_of(folder):
    """The page, checked: nothing from outside, pictures that are well-formed."""
    page = (folder / "index.html").read_text()
    assert not re.search(r"""(src|href)=|@import|url\(|<script""", page)
    for picture in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(picture)
    return page


def headings(page):
    return re.findall("<h2>(.*?)</h2>", page)


def test_replay_writes_a_page_of_the_run(files, tmp_path, call, monkeypatch):
    monkeypatch.setattr("penstock.core.sampling.ALLOWANCE_S", 60.0)  # a busy machine must not keep it from looking
    _, report = call(0, "replay", *files, "--on-bad-row", "drop", "--report", tmp_path / "page")
    page = page_of(tmp_path / "page")
    assert headings(page) == [
        "Summary",
        "Where the time went",
        "Flow",
        "How far rows moved",
        "Learning rates",
        "Dropped",
        "Tables",
        "How often ids occur",
        "Hot ids",
    ]
    assert "3 id_out_of_range" in page
    assert report["state_hash"] in page
    numbers = json.loads((tmp_path / "page" / "report.json").read_text())
    assert numbers["report"]["rows"] == report["rows"] == 1200
    assert numbers["live"]["hot"][0][:2] == ["user", "7"]
    assert [moment["rates"][0] for moment in numbers["live"]["moments"]][-1] == pytest.approx(0.5 / 30)
    assert report["out"] == []


def test_rows_that_become_infinite_do_not_keep_the_page_from_being_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("penstock.core.sampling.ALLOWANCE_S", 60.0)
    (tmp_path / "t.pbtxt").write_text(CONFIG.replace("adagrad {}", "stochastic_gradient_descent {}"))
    gradient = pa.array([[1e30, 1.0]] * 3, pa.list_(pa.float32(), 2))
    log = write(tmp_path / "l.arrows", [frame(0, range(3), gradient=gradient)])
    words = ["replay", str(tmp_path / "t.pbtxt"), log, "--learning-rate", "0=1e30"]
    assert main([*words, "--report", str(tmp_path / "page")]) == 0
    page_of(tmp_path / "page")
    assert json.loads((tmp_path / "page" / "report.json").read_text())["live"]["moments"][-1]["norms"] == {}


def test_an_empty_run_has_no_plots(tmp_path):
    (tmp_path / "t.pbtxt").write_text(CONFIG.replace("dynamic { tag: 0 }", "constant: 0.1"))
    empty = write(tmp_path / "empty.arrows", [], schema=frame().schema)
    words = ["replay", str(tmp_path / "t.pbtxt"), empty, "--report", str(tmp_path / "page")]
    assert main(words) == 0
    assert headings(page_of(tmp_path / "page")) == ["Summary", "Where the time went", "Tables"]


def test_the_page_lists_the_ten_largest_of_many_tables(tmp_path):
    log, page = str(tmp_path / "log.arrows"), tmp_path / "page"
    assert main(["synth", log, "--tables", "30", "--rows", "900", "--rows-per-step", "300", "--vocabulary", "9"]) == 0
    words = ["replay", str(tmp_path / "log.pbtxt"), log, "--no-hash", "--report", str(page), "--json"]
    assert main(words) == 0
    listed = page_of(page).partition("<h2>Tables</h2>")[2].partition("</table>")[0]
    assert listed.count("<td>table_") == 10
    assert "<td>… 20 more" in listed
    assert len(json.loads((page / "report.json").read_text())["report"]["tables"]) == 30


def test_inspect_writes_a_page_of_the_ids(files, tmp_path, capsys):
    assert main(["inspect", files[1], "--report", str(tmp_path / "page")]) == 0
    page = page_of(tmp_path / "page")
    assert headings(page)[:3] == [
        "How often ids come",
        "What the hottest ids make up",
        "How many new ids keep coming",
    ]
    assert f"report    {tmp_path / 'page' / 'index.html'}" in capsys.readouterr().out


def test_hot_ids_are_those_of_the_whole_run_by_table(tmp_path):
    """An id in a fifth of the rows of the first 20 of 600 frames is in 0.67 % of all; another table is much smaller."""
    rng, batches = np.random.default_rng(0), []
    for number in range(600):
        ids = rng.integers(100, 50_000, 1000)
        ids[: 200 if number < 20 else 0] = 5
        tables = pa.array(["user"] * 1000 + ["item"] * 4)
        batches.append(batch(np.concatenate([ids, [1, 1, 1, 2]]), table=tables, step=number))
    (tmp_path / "t.pbtxt").write_text(table(rows=50_000) + table("item") + "mode: TRAINING\n")
    words = ["replay", tmp_path / "t.pbtxt", write(tmp_path / "log.arrows", batches), "--no-hash"]
    assert main([*map(str, words), "--report", str(tmp_path / "page")]) == 0
    hot = json.loads((tmp_path / "page" / "report.json").read_text())["live"]["hot"]
    shares = {(name, row_id): share for name, row_id, share in hot}
    assert hot[0][:2] == ["user", "5"]
    assert shares["user", "5"] < 0.02
    assert (shares["item", "1"], shares["item", "2"]) == (pytest.approx(0.75), pytest.approx(0.25))
    assert [name for name, _, _ in hot] == ["user"] * 5 + ["item"] * 2


def moment(seconds, rows, norms=()):
    return Moment(seconds, rows, rows, rows, 0, 0, {}, dict(norms), ())


def test_a_line_breaks_where_nothing_arrived():
    flow = flow_of([moment(seconds, 10 * seconds) for seconds in (0, 1, 2, 3602, 3603)])
    assert [rate for _, rate in flow] == [10, 10, pytest.approx(math.nan, nan_ok=True), 10]
    norms = norms_of([moment(1, 1, {"a": 1.0, "b": 1.0}), moment(2, 2), moment(3, 3, {"b": 2.0})])
    assert norms == {"a": [(1, 1.0), (3, pytest.approx(math.nan, nan_ok=True))], "b": [(1, 1.0), (3, 2.0)]}
    picture = lines({"a": [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.nan)]}, "x", "y")
    assert (picture.count("<polyline"), picture.count("<circle")) == (1, 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_frames", [1, 30])
def test_the_page_fits_its_window_and_shows_a_single_sample(num_frames, width, tmp_path, browser, monkeypatch):
    monkeypatch.setattr("penstock.core.sampling.ALLOWANCE_S", 60.0)  # a busy machine must not keep it from looking
    names = ["user", "table_" + "x" * 80]
    (tmp_path / "t.pbtxt").write_text("".join(map(table, names)) + "mode: TRAINING\n")
    log = write(tmp_path / "log.arrows", [frame(step, (7, 8), table=names) for step in range(num_frames)])
    assert main(["replay", str(tmp_path / "t.pbtxt"), log, "--report", str(tmp_path / "page")]) == 0
    page = browser.open(tmp_path / "page" / "index.html", width)
    assert page.overflow <= 0
    assert page.errors == []
    assert page.count("circle") >= 2 if num_frames == 1 else page.count("polyline") >= 3


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_inspect_fits_its_window(files, width, tmp_path, browser):
    assert main(["inspect", files[1], "--report", str(tmp_path / "page")]) == 0
    page = browser.open(tmp_path / "page" / "index.html", width, dark=True)
    assert page.overflow <= 0
    assert page.count("polyline") >= 3
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


def test_a_report_that_cannot_be_written_is_exit_6_before_the_work(files, capsys):
    assert main(["replay", *files, "--report", files[0]]) == 6
    assert "cannot write" in capsys.readouterr().err


def test_ids_are_counted_exactly():
    uses = IdUses()
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 5000, 20_000)
    for part in np.array_split(ids, 900):
        uses.add(part)
    assert sorted(uses.times) == sorted(np.unique(ids, return_counts=True)[1])
    assert uses.growth[-1][0] <= 20_000
    assert [rows for rows, _ in uses.growth] == sorted(rows for rows, _ in uses.growth)
    assert len(uses.growth) <= 400


def test_curves_of_ids_are_shares_in_percent():
    times = np.array([1, 6, 2, 1])
    assert frequencies(times) == [(1.0, 0.6), (2.0, 0.2), (3.0, 0.1), (4.0, 0.1)]
    assert covered(times) == [(25.0, 60.0), (50.0, 80.0), (75.0, 90.0), (100.0, 100.0)]
    assert (frequencies(times[:0]), covered(times[:0])) == ([], [])
