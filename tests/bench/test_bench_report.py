"""``penstock bench``: the table, the page and the plots of a result."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from browser import WIDTHS

from penstock.bench import cases, machine, report, runner
from penstock.bench.machine import folder_of
from penstock.bench.report.summary_table import markdown
from penstock.cli import main

ROOT = Path(__file__).resolve().parents[2]


def fake_run(case, kind, x=None, threads=2, **peers_ms):
    def side(ms):
        return {"median_ms": ms, "min_ms": ms * 0.9, "max_ms": ms * 1.2, "clean": 3, "samples_ms": [ms] * 3}

    others = {name: side(ms) | {"ratio": ms / 10.0} for name, ms in peers_ms.items()}
    workload = {"title": "made up", "rows": 1000, "unique": 10, "reuse": 100, "step_mb": 1, "tables_mb": 1}
    sides_ = {"penstock": side(10.0)} | others
    point = {"case": case, "kind": kind, "x": x, "threads": threads, "workload": workload}
    return point | {"sides": sides_, "failed": {"torch_x": "wrong <result>"}, "limit_ms": 4.0}


@pytest.fixture
def result():
    """Two compared cases, and one that grows."""
    runs = [
        fake_run("w1/sgd", "sgd", numpy_reduceat=30.0, torch_add=5.0),
        fake_run("w2/adagrad", "adagrad", fbgemm_tbe=40.0),
        *(fake_run("growth/rows", "adagrad", x) for x in (1000, 10_000)),
    ]
    plan = runner.Plan(cases=["w1/sgd"], threads=[1], rounds=1, sizes=cases.SHORT)
    return runner.as_json(plan, runner.Results(runs=runs, unusable={"polars": "broken"})) | {"absent": ["duckdb"]}


def test_the_table_has_a_row_per_kind_and_names_the_best_peer(result):
    lines = markdown(result).splitlines()
    assert lines[0] == "| ms per step | W1 zipf | W2 no reuse |"
    assert lines[2] == "| SGD | 10 ms, 0.5× torch, 40% of limit | – |"
    assert lines[3] == "| Adagrad | – | 10 ms, 4× fbgemm, 40% of limit |"
    assert lines[-1].startswith("2 threads of ")


def test_the_table_says_when_the_machine_was_not_quiet(result):
    assert "disturbed" not in markdown(result)
    result["runs"][0]["sides"]["penstock"]["clean"] = 1
    assert "Other work on the machine disturbed 1 of 4 cases." in markdown(result)


def test_the_page_needs_no_other_file_and_says_what_failed(result, tmp_path):
    page = report.write_report(tmp_path / "new" / "folder", result).read_text()
    for text in ("growth/rows 10,000", "wrong &lt;result&gt;", "Not installed: duckdb", "Skipped, polars: broken"):
        assert text in page
    assert "src=" not in page
    assert "href=" not in page.replace("xlink:href", "")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_window_and_no_text_of_a_plot_is_clipped(result, width, tmp_path, browser):
    result["machine"]["cpu"] = "Intel(R) Xeon(R) Processor @ 2.50GHz"
    page = browser.open(report.write_report(tmp_path, result), width, dark=width == WIDTHS[0])
    assert page.overflow <= 0
    assert page.errors == []
    box = "box => box.x >= view.x - 1 && box.x + box.width <= view.x + view.width"
    assert (
        page.value(f"""[...document.querySelectorAll("svg")].flatMap(svg => {{
        const view = svg.viewBox.baseVal, fits = {box};
        return [...svg.querySelectorAll("text")].filter(text => !fits(text.getBBox())).map(text => text.textContent);
    }})""")
        == []
    )


def test_every_case_with_numbers_is_drawn(result, tmp_path):
    page = report.write_report(tmp_path, result).read_text()
    drawn = {path.stem: ET.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {"w1-2", "w2-2", "limit-2", "growth-rows"}
    assert page.count("<svg ") == len(drawn)
    texts = {
        name: [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")] for name, root in drawn.items()
    }
    assert texts["w2-2"][0] == f"w2, made up; 2 threads of {result['machine']['cpu']}"
    assert "4×  fbgemm_tbe" in texts["w2-2"]
    assert {"numpy", "torch"} <= set(texts["w1-2"])  # the legend of the libraries' colours
    assert "40 %" in texts["limit-2"]
    assert texts["limit-2"][-2:] == ["penstock", "the best peer"]  # that of bars and marks
    assert "memory's limit, 2 threads" in texts["growth-rows"]
    assert {root.tag for root in drawn.values()} == {"{http://www.w3.org/2000/svg}svg"}


# ---- results of several machines


def test_machines_have_one_folder_each():
    here = machine.describe()
    changes = {"cpu": "Xeon(R) 7", "cpu_model": "1-2-3", "cpus": 999, "system": "X"}
    folders = [folder_of(here), *(folder_of(here | {key: other}) for key, other in changes.items())]
    assert len(set(folders)) == 5  # this machine, and four that differ in one thing
    assert all(name == Path(name).name and name.isascii() for name in folders)
    assert folder_of(here | {"date": "1999-01-01", "memory_gb": 1}) == folders[0]


@pytest.fixture
def kept(result, tmp_path):
    """kept(change): the path of a result of this machine, or of another."""

    def write(**change):
        path = tmp_path / "kept" / "result.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result | {"machine": result["machine"] | change}))
        return path

    return write


@pytest.fixture
def measured(result, monkeypatch):
    """Measuring finds the fixture's runs; a list of the plans that were measured."""
    plans = []

    def run(plan):
        plans.append(plan)
        return runner.Results(runs=result["runs"])

    monkeypatch.setattr(runner, "run", run)
    return plans


def test_an_earlier_result_of_this_machine_is_compared_case_by_case(kept, measured, capsys):
    path = kept()
    earlier = json.loads(path.read_text())
    earlier["runs"][0]["sides"]["penstock"] |= {"median_ms": 25.0, "min_ms": 24.0, "max_ms": 26.0}
    path.write_text(json.dumps(earlier))
    assert main(["bench", "w1/sgd", "--peers", "none", "--against", str(path)]) == 0
    out = capsys.readouterr().out
    assert "w1/sgd, 2 threads: 25.000 ms then, 10.000 now: 2.50 times as fast; 16% of the limit then, 40% now" in out
    assert "w2/adagrad, 2 threads: 10.000 ms then, 10.000 now: 1.00 times as fast (the ranges overlap)" in out


@pytest.mark.parametrize("other", [{"cpu": "Z80"}, {"cpus": 999}, {"system": "CP/M 2.2"}])
def test_a_result_of_another_machine_is_refused_before_anything_is_measured(other, kept, measured, capsys):
    path, kind = kept(**other), str(next(iter(other.values())))
    assert main(["bench", "w1/sgd", "--peers", "none", "--against", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: measured on " in line
    assert kind in line.partition("; this is ")[0]
    assert line.endswith("times of two machines are not compared; compare their shares of the limit")
    assert main(["bench", "w1/sgd", "--peers", "none", "--report", str(path.parent)]) == 2
    assert "give another directory, so that the results of two are not mixed" in capsys.readouterr().err
    assert not measured


def test_a_file_that_is_no_result_is_refused(kept, measured, capsys):
    path = kept()
    path.write_text("[]")
    assert main(["bench", "w1/sgd", "--peers", "none", "--against", str(path)]) == 3
    assert "no result of penstock bench; give a result.json that --report wrote" in capsys.readouterr().err


def test_the_share_of_the_limit_names_its_threads(measured, result, monkeypatch, capsys):
    def run(plan):
        for item in result["runs"]:
            plan.report(item)
        return runner.Results(runs=result["runs"])

    monkeypatch.setattr(runner, "run", run)
    assert main(["bench", "w1/sgd", "--peers", "none"]) == 0
    out = capsys.readouterr().out
    assert " 40% of the limit of 2 threads" in out
    assert machine.named(machine.describe()) in out
