"""``penstock bench``: measure penstock against installed libraries and against the memory bandwidth of this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.base.errors import UsageError
from penstock.base.flag_values import MOST_PARALLEL, number, whole
from penstock.base.threads import num_threads
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, writing

EXAMPLE = "penstock bench 'w1/*' '*/adagrad' --threads 1,2 --report report"
ROUNDS, SHORT_ROUNDS = 9, 3
SCALING = "scaling"


def add(command: Parser) -> None:
    command.add_argument(
        "sources",
        nargs="*",
        metavar="CASE",
        help="names or globs, such as w1/adagrad, '*/coalesce', latency, reads (default: w1 to w4, every kind); or "
        "scaling: the speed-up of w1 to w4 on 1 to 64 threads, by a model from tasks that are measured one by one",
    )
    command.add_argument("--list", action="store_true", help="list the cases, and measure nothing")
    command.add_argument("--threads", metavar="N,N", help="thread counts to measure with (default: all CPUs)")
    command.add_argument(
        "--peers",
        metavar="A,B",
        help="which other libraries take part: numpy, jax, torch, fbgemm, tensorflow, polars, duckdb, "
        "pandas, torchrec, tfra, jax-tpu-embedding; all (slow ways, too) or none (default: those that are installed, "
        "without slow ways)",
    )
    command.add_argument("--rounds", type=whole(1), metavar="N", help=f"turns of every side (default {ROUNDS})")
    command.add_argument("--rows-per-step", type=whole(1), metavar="N", help="of w1 to w4 (default 1048576)")
    command.add_argument(
        "--vocabulary-scale",
        type=number("a number above 0, at most 1000", 0, 1000, with_least=False),
        metavar="F",
        help="factor on the vocabularies of w1 to w4 (default 1)",
    )
    command.add_argument("--short", action="store_true", help="small and quick: to see it work, not to quote")
    command.add_argument("--report", metavar="DIR", help="write the result, plots and a page that shows them")
    command.add_argument(
        "--against",
        metavar="RESULT",
        help="compare with an earlier result.json; that of another machine is refused",
    )
    command.add_argument(
        "--trace",
        metavar="DIR",
        help="measure no case: write a trace of a few steps for Perfetto, and print how busy the host is meanwhile",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from penstock.bench import cases, peers, runner

    if args.trace is not None:
        return traced(args, out)
    if args.sources == [SCALING] and not args.list:
        return scaled(args, out)
    names = cases.select(args.sources)
    if args.list:
        listed = names if args.sources else [*cases.CASES, SCALING]
        for name in listed:
            out.say(name)
        out.result({"cases": listed})
        return 0
    chosen, slow = peers.chosen(args.peers)
    absent = peers.missing(chosen)
    plan = runner.Plan(
        cases=names,
        threads=threads_of(args.threads),
        rounds=args.rounds or (SHORT_ROUNDS if args.short else ROUNDS),
        sizes=sizes_of(args),
        peers=[name for name in chosen if name not in absent],
        slow=slow,
        report=lambda result: say_run(out, result),
    )
    report = checked_report(args.report)
    earlier = earlier_result(args.against, report)
    say_plan(out, plan, absent)
    outcome = runner.run(plan)
    result = runner.as_json(plan, outcome) | {"absent": absent}
    say_end(out, outcome)
    if earlier is not None:
        from penstock.bench.report.comparison import compared

        out.say_all("against   ", compared(earlier, outcome.runs))
    if report is not None:
        from penstock.bench.report import write_report

        with writing(report):
            index = write_report(report, result)
        out.say(f"report    {index}")
    out.result(result)
    return int(bool(outcome.failed))


def traced(args: argparse.Namespace, out: Output) -> int:
    """Run ``--trace DIR`` and return the exit code."""
    others = [
        flag for flag, value in (("CASE", args.sources), ("--list", args.list), ("--report", args.report)) if value
    ]
    if others:
        raise UsageError(f"--trace measures no case: leave {others[0]} out")
    directory = checked_report(args.trace)
    assert directory is not None
    from penstock.bench import trace

    rows = args.rows_per_step or (trace.SHORT_ROWS if args.short else trace.ROWS)
    with writing(directory):
        measured = trace.trace(directory, rows, trace.SHORT_STEPS if args.short else trace.STEPS)
    out.say(f"trace     {measured.path}: open it at ui.perfetto.dev")
    out.say(
        f"overlap   {measured.steps} steps of {count(measured.rows)} rows ({measured.variant}) in "
        f"{measured.seconds:.2f} s: the caller coalesced for {measured.coalesce:.2f} s, the dispatching thread "
        f"worked for {measured.dispatch:.2f} s, both at once for {measured.both:.2f} s"
    )
    out.result({"trace": measured.as_json()})
    return 0


def scaled(args: argparse.Namespace, out: Output) -> int:
    """Run ``scaling`` and return the exit code."""
    others = [f"--{name}" for name in ("threads", "peers", "against") if getattr(args, name) is not None]
    if others:
        raise UsageError(f"scaling measures tasks on one thread, alone: leave {others[0]} out")
    report = checked_report(args.report)
    from penstock.bench import machine, scaling

    host = machine.describe()
    out.say(f"machine   {machine.named(host)}; every task alone, one after the other on one thread")
    threads = ", ".join(map(str, scaling.THREADS))
    out.say(f"model     of {threads} threads, which share no memory bandwidth; its limit is printed next to it: the")
    out.say("          speed-up at which the memory would be busy all the time, at some rates of it")
    rounds = args.rounds or (SHORT_ROUNDS if args.short else ROUNDS)
    result = scaling.measure(sizes_of(args), rounds, lambda workload: say_scaling(out, workload))
    if report is not None:
        path = report / f"scaling-{host['date']}.json"
        with writing(path):
            path.write_text(json.dumps(result, indent=1) + "\n")
        out.say(f"report    {path}")
    out.result(result)
    return 0


def say_scaling(out: Output, workload: dict[str, Any]) -> None:
    limits = ", ".join(f"{limit} at {rate}" for rate, limit in workload["limits"].items())
    out.say(f"\n{workload['workload']}, {count(workload['rows'])} rows a step, {workload['title']}")
    out.say(f"    limits by bandwidth: {limits} GB/s")
    out.say("    threads  speed-up   ms per step   serial   longest chain   tasks   their CPU time, ms")
    for threads, m in workload["threads"].items():
        line = f"    {threads:>7}  {m['speed_up']:8.2f}  {m['step_ms']:12.3f}"
        if "tasks" in m:
            line += f"  {m['serial_ms']:7.3f}  {m['chain_ms']:14.3f}  {m['tasks']:6.0f}   {m['tasks_ms']:18.3f}"
        out.say(line)


def checked_report(text: str | None) -> Path | None:
    """Return the directory of ``--report`` or ``--trace``, created before measuring. Raise OSError if it cannot be."""
    if text is None:
        return None
    path = Path(text)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def earlier_result(text: str | None, report: Path | None) -> dict[str, Any] | None:
    """Return the result of ``--against``. UsageError if it, or one in the report's folder, is another machine's."""
    from penstock.bench.report import check_folder
    from penstock.bench.report.comparison import check_machine, read_result

    if report is not None:
        check_folder(report)
    if text is None:
        return None
    result = read_result(Path(text))
    check_machine(result, Path(text), "times of two machines are not compared; compare their shares of the limit")
    return result


def sizes_of(args: argparse.Namespace) -> Any:
    from penstock.bench.cases import SHORT, Sizes

    sizes = SHORT if args.short else Sizes()
    return replace(sizes, rows=args.rows_per_step or sizes.rows, scale=args.vocabulary_scale or sizes.scale)


def threads_of(text: str | None) -> list[int]:
    """Return the distinct counts of ``--threads 1,2``, sorted; for None, the number of CPUs that this process may use.

    Raise UsageError for a count that is not a number or exceeds the CPUs.
    """
    cpus = num_threads(None)
    if text is None:
        return [cpus]
    try:
        counts = [whole(1, MOST_PARALLEL)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--threads {text}: {error}") from None
    if max(counts) > cpus:
        raise UsageError(f"--threads {text}: this process may use {cpus} CPUs")
    return sorted(set(counts))


# ---- output


def say_plan(out: Output, plan: Any, absent: list[str]) -> None:
    from penstock.bench import machine, runner

    host = machine.describe()
    out.say(f"machine   {machine.named(host)}, {host['memory_gb']} GB, huge pages {host['huge_pages']}")
    out.say("versions  " + ", ".join(f"{name} {version}" for name, version in runner.versions(plan).items()))
    out.say(
        f"peers     {', '.join(plan.peers) or 'none'}" + (f"; not installed: {', '.join(absent)}" if absent else "")
    )
    out.say(f"rounds    {plan.rounds}, {count(plan.sizes.rows)} rows a step; times are ms per step: median (min–max)")


def say_run(out: Output, run: dict[str, Any]) -> None:
    """Print a line for penstock, one for each peer and one for each failure."""
    from penstock.bench.machine import threads_text

    title = run["case"] + (f" {count(run['x'])}" if run["x"] is not None else "")
    threads = threads_text(run["threads"])
    sides = dict(run["sides"])
    ours = sides.pop("penstock", None)
    if ours is not None:
        rate = f"{run['workload']['rows'] / ours['median_ms'] / 1e3:.3g} Mrow/s" if run["kind"] != "startup" else ""
        limit = f"  {run['limit_ms'] / ours['median_ms']:4.0%} of the limit of {threads}" if "limit_ms" in run else ""
        out.say(f"\n{title}, {threads}: {spread(ours)}  {rate}{limit}")
        for name, side in sorted(sides.items(), key=lambda item: item[1]["median_ms"]):
            ratio = f"{side['ratio']:6.2f} times ours" if "ratio" in side else "  ids only, no gradients"
            out.say(f"    {name:28} {spread(side)}  {ratio}")
    for name, problem in run["failed"].items():
        out.say(f"    {title}, {threads}: {name} FAILED, not timed: {problem}")


def spread(side: dict[str, Any]) -> str:
    if "p99_ms" in side:
        return f"{side['median_ms']:9.4f} ms, of 99 % {side['p99_ms']:.4f} at most ({side['reads']:,} reads)"
    few = "" if side["clean"] * 2 >= len(side["samples_ms"]) else " (disturbed)"
    return f"{side['median_ms']:9.3f} ms ({side['min_ms']:.3f}–{side['max_ms']:.3f}){few}"


def say_end(out: Output, outcome: Any) -> None:
    out.say()
    for name, problem in (outcome.unusable | outcome.died).items():
        out.say(f"skipped   {name}: {problem}")
    if outcome.failed:
        out.say(f"FAILED    our own result is wrong or missing in: {', '.join(outcome.failed)}")
