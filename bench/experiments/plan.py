"""What a plan of a dynamic table costs next to the replay of the same log: the best of 3 in turns, and the ratios.

    python bench/experiments/plan.py [ROWS [FOLDER]]

A log with checksums, hashed ids, zipf 1.1 over a tenth as many keys as rows, a fifth of them replaced, dim 32, 8,192
rows a step, Adagrad; read from the page cache if it fits. The log stays in FOLDER, if given, for the next run. The
bounds: a plan with one choice takes at most 70 % of the replay, and each further choice at most 40 % of the first.
"""

import sys
import tempfile
import time
from pathlib import Path

import penstock as ps
from penstock.io.decoding.reader import FrameReader
from penstock.io.synth import SynthOptions, write_synthetic
from penstock.planning.choices import all_choices
from penstock.planning.planner import Planner, reading

ROUNDS = 3
SHARE_OF_REPLAY, SHARE_OF_FIRST = 0.7, 0.4


def config_of(capacity):
    dynamic = ps.Dynamic(min_count=2, expire_after=2000, evict="lru")
    table = ps.TableConfig(capacity, 32, name="table_0", dynamic=dynamic)
    return ps.EmbeddingConfig.from_tables([table], ps.Adagrad(0.05))


def timed(what):
    started, cpu = time.perf_counter(), time.process_time()
    result = what()
    return (time.perf_counter() - started, time.process_time() - cpu), result


def plan(config, log, capacities):
    planner = Planner(config, all_choices(capacities, {}), sample=1)
    planner.run(FrameReader(log, reading(config)))
    return planner


def main(rows, folder):
    log = Path(folder) / f"log-{rows}.arrows"
    keys = rows // 10
    if not log.exists():
        write_synthetic(log, SynthOptions(rows=rows, vocabulary=keys, ids="hashed", churn=0.2))
    capacity = keys // 4
    config = config_of(capacity)
    capacities = [capacity, capacity // 2, capacity * 2, capacity * 3 // 4, capacity * 3 // 2]
    seconds = {"replay": [], "one": [], "five": []}
    for _ in range(ROUNDS):
        spent, report = timed(lambda: ps.Engine(config).run(log))
        seconds["replay"].append(spent)
        spent, one = timed(lambda: plan(config, log, capacities[:1]))
        seconds["one"].append(spent)
        assert one.forecasts[0].tables()["table_0"].report == report.tables["table_0"].keys
        spent, _ = timed(lambda: plan(config, log, capacities))
        seconds["five"].append(spent)
    replay, one, five = (min(seconds[name])[0] for name in ("replay", "one", "five"))
    further = (five - one) / 4
    print(f"{rows:,} rows, {log.stat().st_size / 1e9:.1f} GB; {report.tables['table_0'].keys}")
    print(f"replay                {replay:8.2f} s   {_all(seconds['replay'])}")
    print(f"plan, one choice      {one:8.2f} s   {_all(seconds['one'])}   {one / replay:.0%} of the replay")
    print(f"plan, five choices    {five:8.2f} s   {_all(seconds['five'])}")
    print(f"each further choice   {further:8.2f} s   {further / one:.0%} of the first")
    met = one <= SHARE_OF_REPLAY * replay and further <= SHARE_OF_FIRST * one
    print(f"the bounds are {'met' if met else 'NOT met'}")
    return 0 if met else 1


def _all(seconds):
    return " ".join(f"{wall:.2f} ({cpu:.2f} CPU)" for wall, cpu in seconds)


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(main(rows, sys.argv[2] if len(sys.argv) > 2 else folder))
