"""Processes that write and read shared tables, whose rows show every torn read and every mixture of steps.

A step changes every row of two tables: the slot is the number of the step in all of its floats, and the weights are the
sum of the numbers so far.

    python shared_processes.py write FOLDER STEPS        python shared_processes.py read FOLDER SECONDS CONSISTENT
    python shared_processes.py rename FOLDER STEPS       python shared_processes.py begin FOLDER STEPS
"""

import json
import sys
import time

import numpy as np

from penstock.base.errors import ReadTimeoutError, StateError
from penstock.base.threads import ThreadTeam
from penstock.model.version import Version
from penstock.pyx import update
from penstock.pyx.row_reads import StepWords
from penstock.rows.shared.folder import SharedFolder
from penstock.rows.shared.header import TableLayout
from penstock.serving.shared.table_reader import Reader
from penstock.serving.shared.table_writer import SharedTable, SharedWriter

TABLES, ROWS, DIM, THREADS = ("left", "right"), 6000, 48, 2
INF = float("inf")
LIMITS = {"gradient_min": -INF, "gradient_max": INF, "weight_min": -INF, "weight_max": INF}
NUMBERS = {**LIMITS, "momentum": 1.0}


class Writer:
    """Two tables of one array, updated on threads as an engine does, by momentum 1 and a rate of -1.

    counts_pages : whether readers can see what is being written
    """

    def __init__(self, folder, counts_pages=True):
        rules, first = [], 0
        layout = {"dim": DIM, "vocabulary_size": ROWS, "rows_per_shard": ROWS}
        for name in TABLES:
            rules.append(update.TableRule("momentum", NUMBERS, first_float=first, name=name, **layout))
            first = rules[-1].end
        self.folder, self.team = SharedFolder(folder), ThreadTeam(THREADS)
        floats = self.folder.allocate("rows", first, np.float32)
        self.step = update.Step(rules, [floats])
        per_thread = self.step.counters_per_thread
        counters = self.folder.allocate("pages", (THREADS + 1) * per_thread, np.uint64)
        if counts_pages:
            self.step.count_pages([counters.reshape(THREADS + 1, per_thread)])
        files = {"rows": (self.folder.name(floats),), "pages": (self.folder.name(counters),)}
        layouts = [
            TableLayout(
                name,
                dim=2 * DIM,  # the slot is read too
                num_rows=ROWS,
                num_shards=1,
                mod=False,
                rows_per_shard=ROWS,
                shards_per_part=1,
                row_floats=rule.row_floats,
                first_float=rule.first_float,
                first_page=rule.first_page,
                **files,
            )
            for name, rule in zip(TABLES, rules, strict=True)
        ]
        self.words: StepWords = self.folder.publish(layouts, THREADS + 1, Version("0"))
        self.ids, self.num_steps = np.random.default_rng(0).permutation(ROWS), 0

    def run(self, steps):
        ones = np.ones((ROWS, DIM), np.float32)
        for step in range(self.num_steps + 1, self.num_steps + steps + 1):
            self.words.begin()
            self.step.update([(number, [(self.ids, ones)], -1.0) for number in range(len(TABLES))])
            self.step.run(self.team.run, self.team.threads)
            self.words.end(step)
            self.num_steps = step
            time.sleep(0.001)  # as a stream does, which is read between its steps


def expected_weights(steps):
    """The weight of every row after each step."""
    return np.cumsum(np.arange(steps + 1), dtype=np.float32)


class Watch:
    """Reads rows, and checks that each is whole, and of the step that it says."""

    def __init__(self, folder, consistent):
        self.reader, self.consistent, self.rng = Reader(folder), consistent, np.random.default_rng()
        self.weights = expected_weights(1 << 20)
        self.num_rows = self.num_timeouts = 0

    def read(self, count=500):
        ids = {name: self.rng.integers(0, ROWS, count) for name in TABLES}
        rows = self.reader.lookup(ids, consistent=self.consistent, timeout_ms=2000)
        step = rows.version.step
        both = np.concatenate([rows[name] for name in TABLES])
        steps = both[:, DIM].astype(np.int64)
        assert (both[:, :DIM] == self.weights[steps][:, None]).all(), "a torn row"
        assert (both[:, DIM:] == steps[:, None]).all(), "a torn slot"
        assert not self.consistent or (steps == step).all(), f"rows of steps {set(steps.tolist())}, expected {step}"
        assert (steps >= step).all(), f"a row of step {steps.min()} after step {step}"
        self.num_rows += len(both)


def rename(folder, steps):
    """Take steps whose lineage and epoch are one letter 64 times, which changes with every step."""
    writer = SharedWriter(folder)
    writer.create([SharedTable("left", 1, 1)])
    writer.publish(Version.of("a" * 64, "a" * 64, 0))
    print("ready", flush=True)
    for step in range(steps):
        name = "abcd"[step % 4] * 64
        with writer.step(Version.of(name, name, step)):
            pass


def begin(folder, steps):
    """Take steps, and remain within the next one."""
    writer = Writer(folder)
    writer.run(steps)
    writer.words.begin()
    print("ready", flush=True)
    sys.stdin.read()


def main(role, folder, amount, consistent=""):
    if role == "rename":
        rename(folder, int(amount))
        return
    if role == "begin":
        begin(folder, int(amount))
        return
    if role == "write":
        writer = Writer(folder)
        print("ready", flush=True)
        writer.run(int(amount))
        return
    watch, end_s, refused = Watch(folder, bool(consistent)), time.monotonic() + float(amount), ""
    while time.monotonic() < end_s:
        try:
            watch.read()
        except ReadTimeoutError:
            watch.num_timeouts += 1
        except StateError as error:
            refused = str(error)
            break
    last = watch.reader.version.step
    print(json.dumps({"rows": watch.num_rows, "timeouts": watch.num_timeouts, "refused": refused, "step": last}))


if __name__ == "__main__":
    main(*sys.argv[1:])
