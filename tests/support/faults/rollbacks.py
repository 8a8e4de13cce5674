"""Kills during rollbacks: ``python -m faults.rollbacks KIND SEED COUNT FOLDER``, from tests/support.

Each case copies a folder with a tag, and a child rolls the copy back: in its folder, in an engine that saves, in a
service, or in the folder of a job. The child is killed at a file operation, in half of a write, or at a moment. Then
the copy restores to the bits of before or to those of the version one step later, and can be rolled back again.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from faults.operations import Watched, killing
from rollbacks import CONFIGS, push, trained
from services import service_of
from sharing import LocalJob

import penstock as ps
from penstock.base.filesystem import atomic_files
from penstock.checkpoint.rollbacks import roll_back_folder

KINDS = ("folder", "engine", "service", "job")
SHARES = 2


def prepared(kind, folder):
    """Write the folder of a kind, with a frame in the gate of its newest commit."""
    if kind != "job":
        trained("lru", folder).save(folder)
        return
    job = LocalJob(CONFIGS["lru"], SHARES, num_required=2)
    for first in range(0, 15, 5):
        for engine in job.engines:
            push(engine, range(first, first + 5))
        job.commit(folder)
        if not first:
            ps.tag(folder, "good")


def roll_back(kind, folder):
    if kind in ("folder", "job"):
        roll_back_folder(folder, "good")
        return
    engine = ps.Engine.restore(folder)
    if kind == "engine":
        engine.rollback("good")
        engine.save(folder)
        return
    with service_of(engine, folder, resume=True) as service:
        service.sequencer.roll_back("good")
        os._exit(0)  # without the end of the service, which commits again


def state_hash(folder):
    engine = ps.Engine.restore(folder)
    gate = engine.core.gate
    return f"{engine.state_hash()} {gate.num_accumulated} {engine.session.ledger.totals.rolled_back}"


def in_child(work):
    """Begin some work in a child, which exits with what it returns. Return its id."""
    if child := os.fork():
        return child
    code = 99
    try:
        code = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def code_of(child):
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def expected(kind, folder, place):
    """Return both states, the calls of a rollback, and its seconds."""

    def observe():
        prepared(kind, folder)
        copy = shutil.copytree(folder, place / "probe")
        before, operations = state_hash(copy), Watched()
        with open(place / "calls", "wb") as calls:
            operations.seen_by = calls.fileno()
            atomic_files.operations = operations
            began_s = time.monotonic()
            child = in_child(lambda: roll_back(kind, copy))
            assert code_of(child) == 0
            seconds = time.monotonic() - began_s
        atomic_files.operations = atomic_files.Operations()
        states = {"states": [before, state_hash(copy)], "seconds": seconds}
        (place / "expected").write_text(json.dumps(states))

    assert code_of(in_child(observe)) == 0
    known = json.loads((place / "expected").read_text())
    return known["states"], len((place / "calls").read_bytes().splitlines()), known["seconds"]


def main(kind, seed, count, place):
    place = Path(place)
    folder, counts = place / "run", Counter()
    states, num_calls, seconds = expected(kind, folder, place)
    for number in range(int(seed), int(seed) + int(count)):
        rng, copy = random.Random(number), shutil.copytree(folder, place / "copy")
        how = rng.choice(["operation", "half", "moment"])

        def work(rng=rng, copy=copy, how=how):
            if how != "moment":
                atomic_files.operations = killing(rng.randint(1, num_calls), how == "half")
            roll_back(kind, copy)

        child = in_child(work)
        if how == "moment":
            time.sleep(rng.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
        ended = code_of(child)

        def check(copy=copy, ended=ended):
            state = states.index(state_hash(copy))
            assert ended == -signal.SIGKILL or (ended, state) == (0, 1)
            if not state:
                roll_back_folder(copy, "good")
                assert state_hash(copy) == states[1]
            return state

        state = code_of(in_child(check))
        assert state in (0, 1), f"{kind}: case {number}, {how}"
        counts[f"{'killed' if ended else 'ended'}, {'before' if state == 0 else 'after'}"] += 1
        shutil.rmtree(copy)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
