"""What do ``--ui``, with a browser that polls every two seconds, and ``--metrics`` cost a replay?

Two answers, over the same frames in memory (--frames frames of --frame-rows rows, zipf ids, two tables, Adagrad):

- **spent**: the CPU seconds that a long run spends on a poller, as a share of those of the process: of the threads that
  answer requests (by their thread clocks), and of the run's thread (the probe, before and after steps and frames).
  Exact even on a noisy host, but without indirect costs such as waiting for the gate's lock or evicted caches.
- **noticed**: --rounds pairs of slices of a few frames each, without and with a poller, which polls as often as a slice
  of that length would see; the median of the ratios within pairs, of wall and of CPU seconds, with a bootstrap interval
  of 95 %.

    python bench/experiments/ui_cost.py
"""

from __future__ import annotations

import argparse
import http.server
import os
import platform
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.cli.pages.monitoring import Watching
from penstock.sampling import Probe

VOCABULARY, DIM = 200_000, 32
SIDES = {"metrics scraped": {"metrics": "127.0.0.1:0"}, "live page": {"ui": "127.0.0.1:0"}}
LOOK_EVERY_S = {"metrics scraped": 1.0, "live page": 2.0}  # the interval of the page
UNCOUNTED = 5  # pairs
WATCHING = ("before", "after", "took", "note")  # the probe's methods that a run calls


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--rounds", type=int, default=60, help="pairs of slices")
    arguments.add_argument("--frames", type=int, default=4000, help="of the long run")
    arguments.add_argument("--slice-frames", type=int, default=80)
    arguments.add_argument("--frame-rows", type=int, default=20_000)
    args = arguments.parse_args()
    tables = [ps.TableConfig(VOCABULARY, DIM, name=name) for name in ("user", "item")]
    config = ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(0.1))
    made = batches(args.frame_rows)
    engine = ps.Engine(config, num_required=4)
    source = [made[number % len(made)] for number in range(max(args.frames, args.slice_frames))]
    engine.run(iter(source[: args.slice_frames]))  # compiles
    print(f"machine   {platform.machine()}, {os.cpu_count()} CPUs; frames of {args.frame_rows:,} rows")
    for side in SIDES:
        seconds, cpu_s, run_s, answer_s, looks = spent(engine, source[: args.frames], side)
        print(
            f"spent     {side:16} {seconds:.2f} s, {cpu_s:.2f} CPU s, {looks} looks: in the run {share(run_s, cpu_s)}, "
            f"answering {share(answer_s, cpu_s)}, together {share(run_s + answer_s, cpu_s)} of the CPU seconds"
        )
    for side in SIDES if args.rounds else ():
        pairs = noticed(engine, source[: args.slice_frames], side, args.rounds)
        for which, name in enumerate(("seconds", "CPU s")):
            ratios = np.array([watched[which] / plain[which] for plain, watched in pairs])
            middle, low, high = with_interval(ratios)
            print(
                f"noticed   {side:16} {name:8} median of {len(ratios)} ratios {100 * (middle - 1):+.2f} % "
                f"(95 %: {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %)"
            )


def spent(engine: ps.Engine, source: list[pa.RecordBatch], side: str) -> tuple[float, float, float, float, int]:
    """Return (seconds, CPU seconds, CPU seconds of the probe, CPU seconds of answering, polls) of a run."""
    run_s: list[float] = []
    answer_s: list[float] = []
    handled = http.server.BaseHTTPRequestHandler.handle
    with timed_methods(Probe, WATCHING, run_s), watched(engine, SIDES[side]) as url:
        http.server.BaseHTTPRequestHandler.handle = timed(handled, answer_s)  # type: ignore[method-assign]
        try:
            with looked_at(url, LOOK_EVERY_S[side]) as looks:
                seconds, cpu_s = cost_of(engine, source)
        finally:
            http.server.BaseHTTPRequestHandler.handle = handled  # type: ignore[method-assign]
    # Without the CPU time of the poller, which in production is another process.
    return seconds, cpu_s - looks[1], sum(run_s), sum(answer_s), int(looks[0])


def noticed(
    engine: ps.Engine, source: list[pa.RecordBatch], side: str, rounds: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the costs of pairs of slices, (plain, watched), measured in random order.

    All watched slices share one probe, whose clock stops between them: its initial allowance would be a large share of
    a slice. The first pairs, which use up the allowance, do not count.
    """
    pairs = []
    clock = Stopwatch()
    probe = Probe(lambda name, ids: engine.core.tables.table(name).read(ids), clock) if "ui" in SIDES[side] else None
    for _ in range(rounds + UNCOUNTED):
        costs: dict[bool, tuple[float, float]] = {}
        for looking in random.sample([False, True], 2):
            if not looking:
                engine.watch.probe = None
                costs[False] = cost_of(engine, source)
                continue
            with watched(engine, SIDES[side], probe) as url:
                # A slice is shorter than the poll interval: it is polled with the probability of a poll in its time.
                plain_s = costs[False][0] if False in costs else 0.3
                chance = random.random() < plain_s / LOOK_EVERY_S[side]
                with clock, looked_at(url, plain_s / 3 if chance else None, 1) as looks:
                    seconds, cpu_s = cost_of(engine, source)
                costs[True] = seconds, cpu_s - looks[1]
        pairs.append((costs[False], costs[True]))
    return pairs[UNCOUNTED:]


class Stopwatch:
    """A clock that runs only inside its ``with``."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds, self._since = self(), None


def cost_of(engine: ps.Engine, source: list[pa.RecordBatch]) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a run."""
    began, cpu = time.perf_counter(), time.process_time()
    engine.run(iter(source))
    return time.perf_counter() - began, time.process_time() - cpu


@contextmanager
def watched(engine: ps.Engine, flags: dict[str, str], probe: Probe | None = None) -> Iterator[str]:
    """Serve the engine as the flags specify, with this probe or a new one. Yields the URL to poll."""
    engine.watch.probe = probe
    nothing = dict.fromkeys(("ui", "metrics", "metrics_file", "report"))
    watching = Watching(SimpleNamespace(**(nothing | {"command": "replay", "sources": []} | flags)), engine)  # type: ignore[arg-type]
    with watching:
        yield watching.servers[0].url + ("/live.json" if "ui" in flags else "/metrics")


@contextmanager
def looked_at(url: str, every_s: float | None, most: int = 1 << 30) -> Iterator[list[float]]:
    """Poll the URL from another thread. Yields [number of polls, CPU seconds of the poller]."""
    done, told = threading.Event(), [0.0, 0.0]

    def look() -> None:
        while every_s is not None and told[0] < most and not done.wait(every_s):
            urllib.request.urlopen(url).read()
            told[0] += 1
            told[1] = time.thread_time()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield told
    finally:
        done.set()
        looker.join()


@contextmanager
def timed_methods(kind: type, names: tuple[str, ...], into: list[float]) -> Iterator[None]:
    """Append the CPU seconds of every call of these methods to the list ``into``."""
    before = {name: getattr(kind, name) for name in names}
    for name, method in before.items():
        setattr(kind, name, timed(method, into))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


def timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args)
        finally:
            into.append(time.thread_time() - began)

    return call


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %"


def with_interval(ratios: np.ndarray, draws: int = 4000) -> tuple[float, float, float]:
    """Return the median, and its 2.5 and 97.5 percentiles by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (draws, len(ratios))), axis=1)
    return float(np.median(ratios)), float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def batches(rows: int) -> list[pa.RecordBatch]:
    """Return eight frames to cycle through."""
    rng, made = np.random.default_rng(0), []
    for _ in range(8):
        ids = (rng.zipf(1.1, rows).astype(np.uint64) * 2654435761 % VOCABULARY).astype(np.int64)
        names = pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32) % 2), ["user", "item"])
        gradient = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(rows * DIM, np.float32)), DIM)
        made.append(pa.RecordBatch.from_arrays([names, pa.array(ids), gradient], ["table", "id", "gradient"]))
    return made


if __name__ == "__main__":
    main()
