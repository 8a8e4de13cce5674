"""``penstock bench``: the table, the page and the plots of a result."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from penstock.bench import cases, report, runner
from penstock.bench.report.readme_table import markdown, written

ROOT = Path(__file__).resolve().parents[1]


def test_readmes_table_is_what_the_kept_result_says():
    newest = max((ROOT / "bench" / "results").glob("bench-*.json"))
    readme = (ROOT / "README.md").read_text()
    assert written(readme, markdown(json.loads(newest.read_text()))) == readme


def fake_run(case, kind, x=None, threads=2, **peers_ms):
    def side(ms):
        return {"median_ms": ms, "min_ms": ms * 0.9, "max_ms": ms * 1.2, "clean": 3, "samples_ms": [ms] * 3}

    others = {name: side(ms) | {"ratio": ms / 10.0} for name, ms in peers_ms.items()}
    workload = {"title": "made up", "rows": 1000, "unique": 10, "reuse": 100, "step_mb": 1, "tables_mb": 1}
    sides_ = {"penstock": side(10.0)} | others
    of = {"case": case, "kind": kind, "x": x, "threads": threads, "workload": workload}
    return of | {"sides": sides_, "failed": {"torch_x": "wrong <result>"}, "limit_ms": 4.0}


@pytest.fixture
def result():
    """Two compared cases, and one that grows."""
    runs = [
        fake_run("w1/sgd", "sgd", numpy_reduceat=30.0, torch_add=5.0),
        fake_run("w2/adagrad", "adagrad", fbgemm_tbe=40.0),
        *(fake_run("growth/rows", "adagrad", x) for x in (1000, 10_000)),
    ]
    plan = runner.Plan(cases=["w1/sgd"], threads=[1], rounds=1, sizes=cases.SHORT)
    return runner.as_json(plan, runner.Found(runs=runs, unusable={"polars": "broken"})) | {"absent": ["duckdb"]}


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
    for text in ("growth/rows 10,000", "wrong &lt;result&gt;", "Not installed: duckdb", "Left out, polars: broken"):
        assert text in page
    assert "src=" not in page
    assert "href=" not in page.replace("xlink:href", "")


def test_every_case_with_numbers_is_drawn(result, tmp_path):
    page = report.write_report(tmp_path, result).read_text()
    drawn = {path.stem: ET.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {"w1-2", "w2-2", "limit-2", "growth-rows"}
    assert page.count("<svg ") == len(drawn)
    texts = {
        name: [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")] for name, root in drawn.items()
    }
    assert texts["w2-2"][0] == "w2, made up; 2 threads"
    assert "4×  fbgemm_tbe" in texts["w2-2"]
    assert "40 %" in texts["limit-2"]
    assert "memory's limit, 2 threads" in texts["growth-rows"]
    assert {root.tag for root in drawn.values()} == {"{http://www.w3.org/2000/svg}svg"}
