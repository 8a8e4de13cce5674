"""``penstock bench --trace``: what the host and the device did side by side."""

import json
from pathlib import Path

import pytest

from penstock.bench import trace
from penstock.cli import main


def test_a_trace_shows_the_caller_and_the_dispatching_thread(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    assert main(["bench", "--trace", str(tmp_path / "t"), "--short", "--rows-per-step", "2000", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["trace"]
    assert summary["variant"] == "xla"
    assert [len(trace.spans(Path(summary["path"]), name)) for name in (trace.COALESCE, trace.DISPATCH)] == [4, 4]
    assert 0 < summary["coalesce"] <= summary["seconds"]
    assert summary["both"] <= min(summary["coalesce"], summary["dispatch"])


def test_the_intersection_of_two_rows_of_a_trace():
    assert trace.common([(0, 2), (3, 5)], [(1, 4), (4.5, 9)]) == [(1, 2), (3, 4), (4.5, 5)]
    assert trace.common([(0, 1)], [(1, 2)]) == []


@pytest.mark.parametrize("words", [["w1/*"], ["--list"], ["--report", "r"]])
def test_a_trace_is_not_mixed_with_cases(words, tmp_path, capsys):
    assert main(["bench", *words, "--trace", str(tmp_path)]) == 2
    assert "--trace measures no case: leave " in capsys.readouterr().err
