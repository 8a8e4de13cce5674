"""Kills in one cluster that outlives drivers: ``python tests/support/cluster/kills.py --rounds 25`` (make cluster).

In every round a job loses a reader, an owner and a node, and then its driver, each at a random moment; another driver
resumes it, with other numbers of shares and readers. State hash and deltas are compared with those of one process, and
what the drivers print is one line per failure. ``--first N --rounds 1`` repeats round N.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster.jobs import KINDS, DriverProcess, Nodes, Sources, batches_of

# What a user sees of a failure: what died, and where the job continues.
LINE = re.compile(
    r"((reader|owner) \d+ died or cannot be reached|a block of frames was lost with its node); "
    r"the job continues from (commit \d+|the start)"
)
STEPS = 60


class PromiseError(Exception):
    """A job did not do what docs/ray.md says."""


def check_lines(lines, num_kills):
    """A line per failure; a node takes some actors with it later than others, so that it can be two."""
    for line in lines:
        if not LINE.fullmatch(line):
            raise PromiseError(f"a driver printed: {line}")
    if not 1 <= len(lines) <= num_kills + 1:
        raise PromiseError(f"{len(lines)} lines after {num_kills} kills: {lines}")


def one_round(nodes, sources, wanted, number, seed, folder):
    """Run a job whose reader, owner, node and driver die. Returns how many of each died before the job ended."""
    rng, killed = random.Random(f"{seed} {number}"), Counter()
    steps = sorted(rng.sample(range(4, STEPS - 12), 3))
    kinds = rng.sample(["reader", "owner", "node"], 3)
    kills = [(step, kind, rng.randrange(3), rng.random() * 0.2) for step, kind in zip(steps, kinds, strict=True)]
    node_at = steps[kinds.index("node")]
    last = steps[-1] + rng.randrange(2, 10)
    options = {"every": rng.choice([1, 3, 5]), "rounds_per_block": rng.choice([1, 2])}
    places = {"checkpoint": str(folder / "commits"), "deltas": str(folder / "deltas.arrows")}
    sizes = {"shares": rng.randint(1, 3), "readers": rng.randint(1, 2)}
    actors = [kill for kill in kills if kill[1] != "node"]
    # Paced, so that the job does not end before the delayed kills and that of the driver.
    driver = DriverProcess(nodes.address, sources, actors, pace_s=0.1, **sizes, **options, **places)
    ended = None
    for event in driver.events():
        if "killed" in event:
            killed[event["killed"]] += 1
        if event.get("step", 0) >= node_at and not killed["node"]:
            killed["node"] += 1
            nodes.lose(rng.randrange(len(nodes.nodes)))
        if event.get("step", 0) >= last and all(killed[kind] for kind in ("reader", "owner", "node")):
            time.sleep(rng.random() * 0.2)
            killed["driver"] += 1
            driver.process.kill()
            break
        ended = event if "state_hash" in event else None
    list(driver.events())
    lines = driver.end()[1]
    print(*(f"    {line}" for line in lines), sep="\n")
    check_lines(lines, killed.total() - killed["driver"])
    if ended is None:
        sizes = {"shares": rng.randint(1, 3), "readers": rng.randint(1, 2)}
        driver = DriverProcess(nodes.address, sources, resume=True, **sizes, **options, **places)
        *_, ended = driver.events()
        code, lines = driver.end()
        if code or lines:
            raise PromiseError(f"a driver that resumed ended with {code}: {lines}")
    state_hash, deltas = wanted
    if ended["state_hash"] != state_hash:
        raise PromiseError(f"state {ended['state_hash']}, expected {state_hash}")
    if batches_of(folder / "deltas.arrows") != batches_of(deltas):
        raise PromiseError("other deltas than those of one process")
    return killed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    killed, failed, started = Counter(), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as name, Nodes(args.nodes) as nodes:
        folder = Path(name)
        made = {kind: Sources(folder, kind, STEPS) for kind in KINDS}
        wanted = {kind: job.alone("wanted") for kind, job in made.items()}
        for number in range(args.first, args.first + args.rounds):
            kind, place = KINDS[number % len(KINDS)], folder / str(number)
            place.mkdir()
            try:
                killed += one_round(nodes, made[kind], wanted[kind], number, args.seed, place)
            except PromiseError as problem:
                failed += 1
                print(f"FAILED round {number} ({kind}): {problem}", flush=True)
            print(f"round {number}: {dict(killed)}, {failed} failed, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{killed.total()} kills {dict(killed)}, {failed} rounds failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
