"""Runs a child process per workload and number of threads, and joins the results.

A library may kill its process. The runner then starts another child for the remaining points, without the way that
failed, and records it in the result.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import penstock
from penstock.base.filesystem.pipes import reader_of
from penstock.base.threads import num_threads
from penstock.bench import machine
from penstock.bench.cases import CASES, Point, Sizes, points
from penstock.bench.contestants import OURS
from penstock.bench.peers import PEERS

BASE_BYTES = 1 << 29  # of Python, jax, pyarrow and compiled programs


@dataclass(frozen=True)
class Plan:
    """The points to measure, and how. peers : names in PEERS; slow : slow ways take part; ``report`` : called with each
    result"""

    cases: Sequence[str]
    threads: Sequence[int]
    rounds: int
    sizes: Sizes
    peers: Sequence[str] = ()
    slow: bool = False
    report: Callable[[dict[str, Any]], None] = lambda result: None


@dataclass
class Results:
    """The results of a plan. unusable : peer → why it could not be loaded; died : way → how its process ended"""

    runs: list[dict[str, Any]] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    died: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """The cases in which penstock failed or was wrong."""
        return [name_of(run) for run in self.runs if any(side.startswith(OURS) for side in run["failed"])]


def name_of(run: dict[str, Any]) -> str:
    return str(run["case"]) + (f" {run['x']}" if run["x"] is not None else "")


def run(plan: Plan) -> Results:
    """Measure everything. Raises MemoryError before the first measurement if a case does not fit into memory."""
    orders = list(grouped(plan))
    for _, group in orders:
        check_memory(group)
    results = Results()
    for threads, group in orders:
        measure_group(plan, threads, group, results)
    order = {case: number for number, case in enumerate(CASES)}
    results.runs.sort(key=lambda r: (order[r["case"]], r["threads"], r["x"] or 0))
    return results


def as_json(plan: Plan, results: Results) -> dict[str, Any]:
    """Return the whole result, the input of a report."""
    return {
        "penstock_bench": 1,
        "machine": machine.describe(),
        "versions": versions(plan),
        "sizes": plan.sizes.as_json(),
        "rounds": plan.rounds,
        "peers": list(plan.peers),
        "unusable": results.unusable,
        "died": results.died,
        "failed": results.failed,
        "runs": results.runs,
    }


def versions(plan: Plan) -> dict[str, str]:
    """Return the versions of all libraries that take part; penstock's is that of the running code."""
    return {"penstock": penstock.__version__} | machine.versions([PEERS[name][1] for name in plan.peers])


def grouped(plan: Plan) -> Iterator[tuple[int, list[Point]]]:
    """Yield (threads, points) of each child: the points of a workload share its steps."""
    cpus = num_threads(None)
    groups: dict[tuple[str, int], list[Point]] = {}
    for case in plan.cases:
        for point in points(case, plan.sizes, cpus):
            for threads in (point.threads,) if point.threads else plan.threads:
                name = case if case.startswith("growth/") else point.workload.name
                groups.setdefault((name, threads), []).append(point)
    yield from ((threads, group) for (_, threads), group in groups.items())


def check_memory(group: Sequence[Point]) -> None:
    free = machine.free_bytes()
    for point in group:
        needed = point.num_bytes + BASE_BYTES
        if needed > free:
            size = f" at {point.x:,}" if point.x is not None else ""
            raise MemoryError(
                f"{point.case}{size} needs about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                "leave the case out, or make it smaller with --vocabulary-scale, --rows-per-step or --short"
            )


def measure_group(plan: Plan, threads: int, group: Sequence[Point], results: Results) -> None:
    """Run one child after the other until every point has a result."""
    todo = [[point.case, point.x] for point in group]
    without: list[str] = []
    peers = [peer for peer in plan.peers if peer not in results.unusable]
    while todo:
        order = {
            "cases": list(dict.fromkeys(case for case, _ in todo)),
            "points": todo,
            "threads": threads,
            "cpus": num_threads(None),
            "rounds": plan.rounds,
            "sizes": plan.sizes.as_json(),
            "peers": peers,
            "slow": plan.slow,
            "without": without,
        }
        child = listen(plan, order, results)
        todo = [point for point in todo if point not in child.finished]
        if child.ended is None:
            return
        if child.side in peers:  # died while it was imported
            peers.remove(child.side)
            results.unusable[child.side] = child.ended
        elif child.side not in (OURS, *without) and todo:
            without.append(child.side)
            results.died[f"{child.side} in {child.case}"] = child.ended
        else:
            case, x = todo.pop(0)
            lost = {"case": case, "x": x, "threads": threads, "sides": {}, "failed": {OURS: child.ended}}
            results.runs.append(lost)
            plan.report(lost)


@dataclass
class ChildState:
    """The state of one child. ended : how it died, None if it completed its order; side, case : its last attempt"""

    finished: list[list[Any]] = field(default_factory=list)
    side: str = OURS
    case: str = ""
    ended: str | None = None


def listen(plan: Plan, order: dict[str, Any], results: Results) -> ChildState:
    """Start a child, and process its events until it ends."""
    state, done = ChildState(), False
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock.bench.child", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            text=True,
            pass_fds=[write_end],
            env=machine.environment(order["threads"]),
        )
        os.close(write_end)
        try:
            with io.TextIOWrapper(reader_of(read_end), encoding="utf-8") as events:
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError), child.stdin as stdin:  # the exit is reported below
                    json.dump(order, stdin)
                for line in events:
                    if line.endswith("\n"):  # else the child was killed while it wrote the line
                        done = handle_event(json.loads(line), state, plan, results) or done
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if not done:
            state.ended = exit_reason(child.returncode, errors)
    return state


def handle_event(event: dict[str, Any], state: ChildState, plan: Plan, results: Results) -> bool:
    """Process one event of a child, and return True for the last one."""
    if event["event"] == "begin":
        state.side, state.case = event["side"], event.get("case", state.case)
    elif event["event"] == "unusable":
        results.unusable[event["peer"]] = event["problem"]
    elif event["event"] == "case":
        result = event["result"]
        state.finished.append([result["case"], result["x"]])
        results.runs.append(result)
        plan.report(result)
    return bool(event["event"] == "done")


def exit_reason(code: int, errors: Any) -> str:
    errors.seek(0)
    last = next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "no output")
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process {how}: {last}"[:400]
