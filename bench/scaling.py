"""``penstock bench scaling``: the speed-up of a step on many threads, by model, from the tasks of this machine.

The engine prepares the tasks of a step for k threads. They are done alone, one after the other on one thread, and each
one's CPU time is noted; ``schedule`` says when k workers would end them. The rest of the step is serial: reading,
decoding, the gate, and the preparation of the update, which a real run overlaps with the frame after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from penstock.api.engine import Engine
from penstock.bench import machine
from penstock.bench.cases import Sizes
from penstock.bench.penstock_adapter import config_of
from penstock.bench.roofline import row_bytes
from penstock.bench.schedule import Task, makespan
from penstock.bench.workloads import WORKLOADS, Step, Workload, make
from penstock.pyx.frame_accumulate import Intake
from penstock.pyx.update import Step as Update

THREADS = (1, 2, 4, 8, 16, 32, 64)
GB_PER_S = (100, 200, 400)
KIND = "adagrad"


class Recorder:
    """Takes the place of ``ThreadTeam.run``: does each task of a step alone, and notes its CPU time.

    sums, items : of the step so far; inside : CPU time in here
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.sums, self.items, self.inside = list[Task](), list[Task](), 0.0

    def run(self, tasks: Iterable[Callable[[], bool]]) -> bool:
        began, tasks = time.thread_time(), list(tasks)
        owner = getattr(tasks[0], "__self__", None)
        if isinstance(owner, Intake):
            self._sum(owner)
            tasks = tasks[:1]  # says whether a row is bad
        elif isinstance(owner, Update):
            self._update(owner)
            tasks = tasks[:1]
        results = [task() for task in tasks]
        self.inside += time.thread_time() - began
        return all(results)

    def _sum(self, intake: Intake) -> None:
        folds = dict[int, int]()  # table → where its fold is among the tasks
        before = time.thread_time()
        while (done := intake.work_on_next()) is not None:
            now = time.thread_time()
            phase, table = done
            if phase == "fold" and table in folds:  # was interrupted
                task = self.sums[folds[table]]
                self.sums[folds[table]] = task._replace(seconds=task.seconds + now - before)
            else:
                if phase == "fold":
                    folds[table] = len(self.sums)
                self.sums.append(Task(phase, table, now - before))
            before = time.thread_time()

    def _update(self, update: Update) -> None:
        before = time.thread_time()
        while update.help_with_next():
            now = time.thread_time()
            self.items.append(Task("item", 0, now - before))
            before = time.thread_time()


class Taken:
    """The least times of one step in all rounds, in seconds. serial : outside of tasks; total : with them"""

    def __init__(self) -> None:
        self.total = self.serial = float("inf")
        self.sums, self.items = list[Task](), list[Task]()

    def note(self, total: float, recorder: Recorder) -> None:
        self.total, self.serial = min(self.total, total), min(self.serial, total - recorder.inside)
        self.sums, self.items = least(self.sums, recorder.sums), least(self.items, recorder.items)


def measure(sizes: Sizes, rounds: int, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure w1 to w4. report : is called with the result of each"""
    workloads = []
    for name in WORKLOADS:
        workload = replace(make(name, sizes.rows, sizes.scale), num_steps=2)
        workloads.append(of_workload(workload, rounds))
        report(workloads[-1])
    return {"scaling": 1, "machine": machine.describe(), "rounds": rounds, "workloads": workloads}


def of_workload(workload: Workload, rounds: int) -> dict[str, Any]:
    """Return the model of one workload; times in milliseconds, each the least of all rounds."""
    steps = workload.steps()
    engine, recorder = Engine(config_of(workload, KIND), threads=1), Recorder()
    team = engine.core.pipeline.team
    team.run = recorder.run  # type: ignore[method-assign]
    by_threads = dict[int, list[dict[str, float]]]()
    for threads in THREADS:
        team.threads = threads
        taken = [Taken() for _ in steps]
        for number in range(len(steps) * rounds):
            _take(engine, steps[number % len(steps)], recorder, taken[number % len(steps)])
        by_threads[threads] = [of_tasks(threads, each) for each in taken]
    modelled = {threads: {key: _mean(m[key] for m in each) for key in each[0]} for threads, each in by_threads.items()}
    moved = sum(moved_bytes(step) for step in steps) / len(steps)
    one = modelled[1]["step_ms"]
    return {
        "workload": workload.name,
        "title": workload.title,
        "rows": workload.rows,
        "moved_bytes": round(moved),
        "threads": {
            str(threads): {"speed_up": round(one / model["step_ms"], 2), **{k: round(v, 4) for k, v in model.items()}}
            for threads, model in modelled.items()
        },
        "limits": {str(rate): round(one / (moved / rate / 1e6), 1) for rate in GB_PER_S},
    }


def _take(engine: Engine, step: Step, recorder: Recorder, taken: Taken) -> None:
    """Take a step twice; note the second, which has no start or end of a run in it."""
    marks = list[float]()

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(2):
            yield from step.batches
            engine.core.wait()
            marks.append(time.process_time())
            if len(marks) == 1:
                recorder.begin()
            else:
                taken.note(marks[1] - marks[0], recorder)

    engine.run(batches(), contribution_rows=step.workload.rows)


def of_tasks(threads: int, taken: Taken) -> dict[str, float]:
    """Return the model of a step: on so many workers, and with a worker for each task."""
    sums, items, serial = taken.sums, taken.items, taken.serial
    workers = makespan(sums, threads) + makespan(items, threads)
    chain = makespan(sums, 8 * len(sums) + 1) + makespan(items, len(items) + 1)
    if threads == 1:  # nothing is shared; an update is then no task
        return {"step_ms": 1e3 * taken.total}
    return {
        "step_ms": 1e3 * (serial + workers),
        "serial_ms": 1e3 * serial,
        "chain_ms": 1e3 * chain,
        "tasks_ms": 1e3 * sum(task.seconds for task in (*sums, *items)),
        "tasks": len(sums) + len(items),
    }


def least(before: list[Task], now: Sequence[Task]) -> list[Task]:
    """Return the shorter of each two equal tasks. before : [] in the first round"""
    if [task[:2] for task in before] != [task[:2] for task in now]:
        return list(now)
    return [min(pair, key=lambda task: task.seconds) for pair in zip(before, now, strict=True)]


def moved_bytes(step: Step) -> int:
    """Return the traffic that no step can avoid: rows read once, touched rows of tables read and written once."""
    unique = step.num_unique
    tables = step.workload.tables
    return step.workload.step_bytes + sum(2 * unique[table.name] * row_bytes(KIND, table)[2] for table in tables)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
