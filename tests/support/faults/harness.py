"""Faults of one replay with a checkpoint: what is done to it, and what must hold after.

After any fault the same command with --resume ends with the state hash of a run that nothing happened to, and with
its files of deltas and of bad rows. The first of the two commands has --resume or not, by the case's name. One of the
tables is dynamic: its keys wait, expire and are evicted all through the log.
"""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from checkpoints import config_of, log_of
from ipc import log, messages
from quarantines import read

import penstock as ps

HERE = Path(__file__).resolve().parent
STEPS = 16
VISITOR = ps.TableConfig(
    22,
    2,
    name="visitor",
    optimizer=ps.Adagrad(0.1),
    dynamic=ps.Dynamic(min_count=2, forget_after=5, expire_after=1, evict="lru", on_full="reject"),
)

# kind → the operations that stand in for the system's
FAULTS = {
    "kill": lambda n: ["killing", n],
    "kill-half": lambda n: ["killing", n, True],
    "eio": lambda n: ["failing", n, errno.EIO],
    "enospc": lambda n: ["failing", n, errno.ENOSPC, True],
    "short": lambda n: ["short_write", n],
}


class PromiseError(AssertionError):
    """A promise did not hold; the text ends with the command that shows it again."""


class Harness:
    """One log, its unbroken run, and a server of forked children. A context manager.

    folder : for everything that is written
    passes : replays of the cases read the log so many times, each for a share of the rows; the unbroken run does not
    placement : of all tables in the cases; those of the unbroken run lie on the devices; "shared": on the host, in
        files that a reader reads after each case
    """

    def __init__(self, folder, seed=0, passes=None, placement="device"):
        self.folder, self.seed = Path(folder), seed
        self._options = [] if passes is None else ["--passes", passes]
        self._again = [*self._options, *([] if placement == "device" else ["--placement", placement])]
        self.config, self.log = self.folder / "tables.pbtxt", self.folder / "log.arrows"
        config = config_of(more=[VISITOR])
        config.save(self.config)
        self.placed, self.is_shared = self.folder / "placed.pbtxt", placement == "shared"
        placed(config, "host" if self.is_shared else placement).save(self.placed)
        self.tables = sorted(f"{table}.parquet" for table in config.table_names)
        self.batches = [with_visitors(with_bad_row(batch)) for batch in log_of(range(STEPS))]
        self.log.write_bytes(log(self.batches))
        cache = {"DIR": str(self.folder / "jax"), "MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
        names = {"DIR": "JAX_COMPILATION_CACHE_DIR"}
        settings = {names.get(key, f"JAX_PERSISTENT_CACHE_{key}"): value for key, value in cache.items()}
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A signal to the group of this process would end the command of a case with 130.
            start_new_session=True,
            env={**os.environ, **settings, "JAX_PLATFORMS": "cpu"},
        )

    def __enter__(self):
        self.unbroken = self._whole_run()
        self.content = self._content("unbroken")
        self.run(self.argv("warm"))  # compiles what a run with commits needs, into jax's cache
        answer = self.run(self.argv("probe"))
        self.seconds, self.num_calls = answer["seconds"], len(answer["calls"])
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def run(self, argv, **case):
        self._server.stdin.write(json.dumps({"argv": [str(a) for a in argv], **case}) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def argv(self, name, *flags, log=None):
        command = "passes" if self._options else "replay"
        line = [command, self.placed, log or self.log, "--num-required", "3", "--threads", "1", "--json", *flags]
        line += ["--flush", "--out", self.folder / f"{name}-out", *self._files(name), *self._options]
        line += ["--shared", self.folder / f"{name}-shared"] if self.is_shared else []
        return [*line, "--checkpoint", self.folder / name, "--every", "1", "--resume"]

    def _files(self, name):
        places = self.folder / f"{name}-deltas", self.folder / f"{name}-bad-rows"
        return ["--deltas", places[0], "--on-bad-row", f"quarantine={places[1]}"]

    def _content(self, name):
        """What the files of deltas and of bad rows hold."""
        return [batches_in(self.folder / f"{name}-{kind}") for kind in ("deltas", "bad-rows")]

    def _whole_run(self):
        line = ["replay", self.config, self.log, "--num-required", "3", "--threads", "1", "--json", "--flush"]
        answer = self.run([*line, *self._files("unbroken")])
        assert answer["code"] == 0, answer["err"]
        report = json.loads(answer["out"])
        keys = report["tables"]["visitor"]["keys"]
        assert min(keys[name] for name in ("evicted", "expired", "returned", "rejected", "unadmitted_rows")) > 0, keys
        return report["state_hash"]

    # ---- what must hold

    def check(self, name, **case):
        """One case by its name: ``moment:N``, ``kill:N``, ``eio:N``, …. Returns whether the fault came to pass."""
        kind, _, number = name.partition(":")
        folder = self.folder / name.replace(":", "-")
        self._remove(folder)
        argv = self.argv(folder.name)
        first = argv[: random.Random(name).choice([-1, None])]
        if kind == "moment":
            # By file operations, so that a slow machine is not always killed before its first commit.
            rng = random.Random(f"{self.seed} {number}")
            calls, seconds = rng.randint(0, self.num_calls), rng.uniform(0, 0.2) * rng.choice([0, 0.05, 1])
            answer = self.run(first, kill_after_calls=calls, kill_after_s=seconds)
            allowed = {0, -9}
        elif kind == "limit":
            answer, allowed = self.run(first, limit_bytes=int(number)), {0, 6}
        else:
            answer = self.run(first, fault=FAULTS[kind](int(number)))
            allowed = {0, -9} if kind.startswith("kill") else {0, 5, 6}
        self._expect(name, answer["code"] in allowed, f"exit code {answer['code']}", answer)
        if answer["code"] > 0:
            one_line = re.fullmatch(r"penstock: .+\n", answer["err"])
            self._expect(name, one_line, "not one line of error", answer)
        resumed = self.run(argv)
        self._expect(name, resumed["code"] == 0, f"--resume ends with {resumed['code']}", resumed)
        state_hash = json.loads(resumed["out"])["state_hash"]
        self._expect(name, state_hash == self.unbroken, f"state {state_hash}, unbroken {self.unbroken}", resumed)
        tables = sorted(os.listdir(f"{folder}-out"))
        self._expect(name, tables == self.tables, f"--out holds {tables}, not {self.tables}", resumed)
        if self.is_shared:
            self._expect(name, reads_its_rows(folder), "the shared tables are not those of --out", resumed)
        same = self._content(folder.name) == self.content
        self._expect(name, same, "the deltas or the bad rows are not those of the unbroken run", resumed)
        self._remove(folder)
        return answer["code"] != 0

    def _remove(self, folder):
        for used in (folder, f"{folder}-out", f"{folder}-shared"):
            shutil.rmtree(used, ignore_errors=True)
        for kind in ("deltas", "bad-rows"):
            for path in folder.parent.glob(f"*{folder.name}-{kind}*"):
                path.unlink()

    def _expect(self, name, held, problem, answer):
        if not held:
            options = "".join(f" {word}" for word in self._again)
            again = f"python {HERE.relative_to(HERE.parents[2])}/run.py --seed {self.seed} --only {name}{options}"
            raise PromiseError(f"{name}: {problem}\n{answer['err']}\nagain: {again}")


def reads_its_rows(folder):
    """Whether the files of ``--shared`` have the rows of ``--out``, of the step of the last commit."""
    with ps.Reader(f"{folder}-shared") as reader:
        for name in reader.tables:
            table = pa.parquet.read_table(f"{folder}-out/{name}.parquet")
            rows = np.array(table["row"].to_pylist(), np.float32).reshape(len(table), -1)
            if len(rows) and not np.array_equal(reader.lookup(name, table["id"].to_numpy(), consistent=True), rows):
                return False
        return reader.version.step == reader.durable_step


def placed(config, placement):
    """The same tables elsewhere; of cached ones a sixtieth of the rows is on the devices, less than a step needs."""
    message = config.to_engine_proto()
    for spec in config.tables:
        settings = next((table for table in message.table if table.name == spec.name), None)
        settings = settings or message.table.add(name=spec.name)
        settings.placement.where = placement.upper()
        if placement == "cached":
            settings.placement.device_bytes = spec.row_bytes * (1 + spec.vocabulary_size // 60)
    return ps.EmbeddingConfig.from_proto(message)


def with_bad_row(batch):
    """Its first id is none."""
    ids = pa.array([-1, *batch["id"].to_pylist()[1:]], pa.int64())
    return batch.set_column(batch.schema.get_field_index("id"), "id", ids)


def with_visitors(batch):
    """The same frame with rows of the dynamic table, whose keys drift from step to step."""
    step = batch["step"][0].as_py()
    rng = np.random.default_rng([step, int(batch["contributor"][0].as_py()[1:])])
    keys = (step + rng.integers(0, 24, 16)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    more = pa.RecordBatch.from_pydict(
        {
            "table": ["visitor"] * len(keys),
            "step": pa.array([step] * len(keys), pa.int64()),
            "contributor": [batch["contributor"][0].as_py()] * len(keys),
            "id": pa.array(keys.view(np.int64)),
            "gradient": pa.array(
                rng.standard_normal((len(keys), 2)).astype(np.float32).tolist(), batch["gradient"].type
            ),
        }
    )
    return pa.concat_batches([batch, more])


def batches_in(path):
    """Every batch that has rows, as bytes: the deltas of one run and of two in a row are cut alike."""
    return [batch.serialize().to_pybytes() for batch in read(path) if batch.num_rows]


def deliver(path, order):
    """Put the batches of a log that lies there into another order: repeated, missing, swapped."""
    head, pieces, end = messages(path.read_bytes())
    path.write_bytes(head + b"".join(pieces[n] for n in [*order, len(pieces) - 1]) + end)
