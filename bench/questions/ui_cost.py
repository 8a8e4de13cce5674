"""What do ``--ui``, with a browser that looks once a second, and ``--metrics-file`` cost a replay?

The same log in memory (--frames frames of --frame-rows rows, zipf ids, two tables, Adagrad) goes through one engine per
side, in turns: nothing watched; metrics scraped once a second; the live page's look, its data asked for once a second.
Told are the seconds of a whole run and the CPU seconds of the process, who looks included: median, least, most, and the
medians' ratio to the side that is not watched. On a machine that has other work only CPU seconds say something.

    python bench/questions/ui_cost.py --rounds 7
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import threading
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.cli.watching import Watching

VOCABULARY, DIM = 200_000, 32
SIDES = {
    "not watched": {},
    "metrics scraped": {"metrics": "127.0.0.1:0"},
    "live page": {"ui": "127.0.0.1:0"},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--frames", type=int, default=1000)
    arguments.add_argument("--frame-rows", type=int, default=20_000)
    args = arguments.parse_args()
    tables = [ps.TableConfig(VOCABULARY, DIM, name=name) for name in ("user", "item")]
    config = ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(0.1))
    made = batches(args.frame_rows)
    source = [made[number % len(made)] for number in range(args.frames)]
    engines = {side: ps.Engine(config, num_required=4) for side in SIDES}
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(args.rounds + 1):
        for side in random.sample(list(SIDES), len(SIDES)):
            both = timed(engines[side], source, SIDES[side])
            if number:  # the first round warms up
                times[side].append(both)
    print(f"machine   {platform.machine()}, {os.cpu_count()} CPUs; {args.frames} frames of {args.frame_rows:,} rows")
    for which, name in enumerate(("seconds", "CPU s")):
        base = statistics.median(of[which] for of in times["not watched"])
        for side, pairs in times.items():
            of = [pair[which] for pair in pairs]
            middle = statistics.median(of)
            print(f"{name:8} {side:16} {middle:.3f} ({min(of):.3f}–{max(of):.3f})  {100 * (middle / base - 1):+.1f} %")


def timed(engine: ps.Engine, source: list[pa.RecordBatch], flags: dict[str, str]) -> tuple[float, float]:
    """Seconds and CPU seconds of one run, with somebody looking."""
    engine.watch.probe = None
    given = {
        "ui": None,
        "metrics": None,
        "metrics_file": None,
        "report": None,
        "command": "replay",
        "sources": [],
    } | flags
    watching, done = Watching(SimpleNamespace(**given), engine), threading.Event()
    with watching:
        paths = [server.url + ("/live.json" if "ui" in flags else "/metrics") for server in watching.servers]

        def look() -> None:
            while paths and not done.wait(1):
                urllib.request.urlopen(paths[0]).read()

        looker = threading.Thread(target=look)
        looker.start()
        started = time.process_time()
        seconds = engine.run(iter(source)).seconds
        spent = time.process_time() - started
        done.set()
        looker.join()
    return seconds, spent


def batches(rows: int) -> list[pa.RecordBatch]:
    """Eight frames that are given again and again."""
    rng, made = np.random.default_rng(0), []
    for _ in range(8):
        ids = (rng.zipf(1.1, rows).astype(np.uint64) * 2654435761 % VOCABULARY).astype(np.int64)
        names = pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32) % 2), ["user", "item"])
        gradient = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(rows * DIM, np.float32)), DIM)
        made.append(pa.RecordBatch.from_arrays([names, pa.array(ids), gradient], ["table", "id", "gradient"]))
    return made


if __name__ == "__main__":
    main()
