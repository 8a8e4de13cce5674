"""``penstock bench scaling``: the model of tasks on many workers, by hand, and the command. No timing is asserted."""

import json
from dataclasses import replace

import pytest

from penstock.api.engine import Engine
from penstock.bench.penstock_adapter import config_of
from penstock.bench.scaling import Recorder
from penstock.bench.schedule import MOST_FOLDING, Task, makespan
from penstock.bench.workloads import make
from penstock.cli import main


def items(*seconds):
    return [Task("item", 0, each) for each in seconds]


def test_a_free_worker_takes_the_next_item():
    assert makespan([], 3) == 0
    assert makespan(items(3, 1, 1, 1), 1) == 6
    assert makespan(items(3, 1, 1, 1), 2) == 3
    assert makespan(items(1, 1, 1, 3), 2) == 4  # the longest comes last
    assert makespan(items(3, 1, 1, 1), 64) == 3


def test_parts_wait_until_all_rows_of_their_table_are_split():
    tasks = [Task("split", 0, 2), Task("split", 0, 1), Task("add", 0, 4), Task("add", 0, 1)]
    assert makespan(tasks, 1) == 8
    assert makespan(tasks, 2) == 2 + 4
    assert makespan(tasks, 64) == 2 + 4
    other = [Task("find", 1, 3)]
    assert makespan([*tasks, *other], 2) == 6  # the second worker finds from 1 to 4, and then adds from 4 to 5
    assert makespan([*tasks, Task("split", 1, 1), Task("add", 1, 1)], 64) == 6


def test_a_fold_follows_its_find_and_is_shared_by_those_who_have_nothing_else():
    tasks = [Task("find", 0, 2), Task("fold", 0, 8)]
    assert makespan(tasks, 1) == 10
    # The second worker folds from the start, an eighth in a second, of which the first ends with the find.
    assert makespan(tasks, 2) == 6
    assert makespan(tasks, 1 + MOST_FOLDING) == 2
    assert makespan(tasks, 64) == 2
    assert makespan([Task("fold", 0, 8)], 64) == 8 / MOST_FOLDING


def test_tasks_that_are_done_alone_are_those_of_a_run():
    workload = replace(make("w1", 40_000, 0.01), num_steps=1)
    (step,) = workload.steps()
    run, alone = (Engine(config_of(workload, "adagrad"), threads=4) for _ in range(2))
    recorder = Recorder()
    alone.core.pipeline.team.run = recorder.run
    for engine in (run, alone):
        engine.run(iter(step.batches), contribution_rows=workload.rows)
    assert alone.state_hash() == run.state_hash()
    phases = [task.phase for task in recorder.sums]
    assert phases == sorted(phases, reverse=True)
    assert set(phases) == {"split", "add"}
    assert len(recorder.items) >= phases.count("add")  # the sums of each part are updated on their own


def test_the_command_models_every_workload(tmp_path, call):
    small = ["--short", "--rows-per-step", "20000", "--rounds", "1", "--vocabulary-scale", "0.001"]
    text, result = call(0, "bench", "scaling", *small, "--report", tmp_path / "r")
    assert [each["workload"] for each in result["workloads"]] == ["w1", "w2", "w3", "w4"]
    for each in result["workloads"]:
        assert list(each["threads"]) == ["1", "2", "4", "8", "16", "32", "64"]
        assert each["limits"]["400"] > each["limits"]["100"] > 0
        for threads, model in each["threads"].items():
            assert model["step_ms"] > 0
            assert threads == "1" or model["chain_ms"] <= model["step_ms"]
            assert threads == "1" or model["tasks"] >= 2
    assert "model     of 1, 2, 4, 8, 16, 32, 64 threads, which share no memory bandwidth" in text
    (path,) = (tmp_path / "r").iterdir()
    assert json.loads(path.read_text()) == result


@pytest.mark.parametrize("words", [["--threads", "1"], ["--peers", "none"], ["--against", "r.json"]])
def test_scaling_has_its_own_threads_and_no_peers(words, capsys):
    assert main(["bench", "scaling", *words]) == 2
    assert f"leave {words[0]} out" in capsys.readouterr().err
