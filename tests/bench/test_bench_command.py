"""``penstock bench`` as a command: cases and peers by name, its processes and their ends. No timing is asserted."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.bench import cases, machine, peers, runner
from penstock.cli import main


def test_names_and_globs_choose_cases():
    assert cases.select(["w1/adagrad"]) == ["w1/adagrad"]
    assert cases.select(["*/coalesce", "w2/*"])[:3] == ["w1/coalesce", "w2/coalesce", "w2/sgd"]
    assert cases.select([]) == list(cases.COMPARED)
    with pytest.raises(UsageError, match="did you mean w1/adagrad"):
        cases.select(["w1/adagrda"])
    for case in cases.CASES:
        assert cases.points(case, cases.Sizes(), 2), case


def test_peers_are_chosen_by_name():
    assert peers.chosen("none") == ([], False)
    assert peers.chosen("torch, numpy") == (["torch", "numpy"], True)
    assert peers.chosen("all")[1]
    assert not peers.chosen(None)[1]
    with pytest.raises(UsageError, match="--peers scipy: expected numpy"):
        peers.chosen("scipy")


SMALL = ["--short", "--rows-per-step", "3000", "--vocabulary-scale", "0.001", "--rounds", "1", "--threads", "1"]


def test_the_command_measures_and_reports(tmp_path, call):
    folder = tmp_path / "report"
    text, result = call(0, "bench", "w4/sgd", "w1/coalesce", *SMALL, "--peers", "numpy", "--report", folder)
    assert [run["case"] for run in result["runs"]] == ["w1/coalesce", "w4/sgd"]
    for run in result["runs"]:
        assert set(run["sides"]) > {"penstock"}
        assert run["failed"] == {}
        assert run["limit_ms"] > 0
    assert result["failed"] == []
    assert result["versions"]["numpy"] == np.__version__
    assert "w4/sgd, 1 thread:" in text
    assert json.loads((folder / "result.json").read_text()) == result
    page = (folder / "index.html").read_text()
    assert "numpy_reduceat_fancy" in page
    assert "<svg" in page


@pytest.mark.evidence
def test_reads_small_frames_and_the_start_are_measured(call):
    text, result = call(0, "bench", "latency", "frames", "startup", "reads", "rollback", *SMALL, "--peers", "none")
    sides = {run["case"]: run["sides"] for run in result["runs"]}
    assert set(sides["frames"]) == {"penstock", "bare_consumer"}
    assert set(sides["startup"]) == {"penstock", "import_jax"}
    assert set(sides["rollback"]) == {"penstock", "with_commit", "commit"}
    assert sides["reads"].keys() >= {
        "penstock",
        "rows_1024",
        "during_updates",
        "unlocked_during_updates",
        "flight",
        "flight_consistent",
    }
    assert sides["reads"].keys() >= {"reader_rows_1024", "reader_during_updates", "reader_consistent_during_updates"}
    assert sides["reads"].keys() >= {"flight_during_updates", "flight_consistent_during_updates"}
    for side in sides["reads"].values():
        assert 0 < side["min_ms"] <= side["median_ms"] <= side["p99_ms"] <= side["max_ms"]
    assert all(run["failed"] == {} for run in result["runs"])
    assert "of 99 %" in text


def test_a_case_that_cannot_fit_is_one_line_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda: 10**9)
    assert main(["bench", "w2/adam", "--rows-per-step", "1000", "--peers", "none"]) == 6
    output = capsys.readouterr().err
    assert "penstock: out of memory: w2/adam needs about 10.1 GB and 1.0 GB are free: leave the case out" in output


def test_list_measures_nothing(capsys, call):
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.split() == [*cases.CASES, "scaling"]
    assert call(0, "bench", "w3/*", "--list")[1]["cases"] == [f"w3/{kind}" for kind in cases.KINDS]


BAD = {
    "w9/adagrad": "there is none of that name",
    "w1/sgd --threads 0": "at least 1",
    "w1/sgd --threads 1,x": "whole number",
    "w1/sgd --threads 1000": "may use",
    "w1/sgd --peers torhc": "--peers torhc: expected numpy",
    "w1/sgd --rounds 0": "at least 1",
    "w1/sgd --vocabulary-scale -1": "above 0",
    "w1/sgd --vocabulary-scale nan": "above 0",
}


@pytest.mark.parametrize("flags", BAD)
def test_a_wrong_flag_is_a_usage_error(flags, capsys):
    assert main(["bench", *flags.split()]) == 2
    assert BAD[flags] in capsys.readouterr().err


def plan(**changes):
    return runner.Plan(**({"cases": ["w1/sgd"], "threads": [1], "rounds": 1, "sizes": cases.SHORT} | changes))


def test_a_peer_that_kills_its_process_is_reported_and_the_rest_is_measured(monkeypatch):
    heard = [
        runner.ChildState([["w1/sgd", None]], "torch_bad", "w1/adagrad", "the process was killed by signal 6: abort"),
        runner.ChildState([["w1/adagrad", None]]),
    ]
    orders = []
    monkeypatch.setattr(runner, "listen", lambda plan, order, result: orders.append(order) or heard.pop(0))
    actual = runner.run(plan(cases=["w1/sgd", "w1/adagrad"], peers=["torch"]))
    assert orders[1]["points"] == [["w1/adagrad", None]]
    assert orders[1]["without"] == ["torch_bad"]
    assert actual.died == {"torch_bad in w1/adagrad": "the process was killed by signal 6: abort"}
    assert actual.failed == []


def test_a_killed_measurement_of_penstock_fails_the_case(monkeypatch):
    monkeypatch.setattr(
        runner, "listen", lambda plan, order, result: runner.ChildState([], "penstock", "w1/sgd", "gone")
    )
    actual = runner.run(plan())
    assert actual.failed == ["w1/sgd"]
    assert actual.runs[0]["failed"] == {"penstock": "gone"}


def test_the_end_of_a_killed_child_is_noticed(monkeypatch):
    monkeypatch.setattr(machine, "environment", lambda threads: {**os.environ, "PYTHONPATH": "/nowhere", "PATH": ""})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    heard = runner.listen(plan(), {"threads": 1}, runner.Results())
    assert heard.ended == "the process ended with exit code 1: no output"


def test_half_a_line_of_a_child_that_was_killed_is_no_event(monkeypatch, tmp_path):
    child = tmp_path / "child"
    child.write_text("""#!/bin/sh\nprintf '{"event": "beg' >/proc/self/fd/$3\nkill -9 $$\n""")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    heard = runner.listen(plan(), {"threads": 1}, runner.Results())
    assert heard.ended == "the process was killed by signal 9: no output"


def test_thread_settings_come_before_any_import():
    code = "import sys, penstock.bench.child; print(*[m for m in ('numpy', 'jax', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert machine.environment(3)["OMP_NUM_THREADS"] == "3"
