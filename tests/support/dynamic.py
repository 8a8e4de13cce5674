"""Engines with dynamic tables, logs for them, and a reader of their deltas."""

import zlib

import numpy as np
import pyarrow as pa
from batches import batch
from openings import hashed

import penstock as ps

# Keys wait, expire and are evicted.
ALL_POLICIES = ps.Dynamic(min_count=2, expire_after=9, evict="lru")


def config_of(dynamic=None, rows=64, dim=4, optimizer=None, name="user", **more):
    """One dynamic table ``user``."""
    dynamic = ps.Dynamic() if dynamic is None else dynamic
    table = ps.TableConfig(rows, dim, name=name, optimizer=optimizer or ps.Adagrad(0.1), dynamic=dynamic)
    return ps.EmbeddingConfig.from_tables([table], **more)


def engine_of(dynamic=None, **options):
    """An engine of one dynamic table. options : rows, dim and optimizer of the table, the rest of the engine"""
    names = ("rows", "dim", "optimizer")
    config = config_of(dynamic, **{name: options.pop(name) for name in names if name in options})
    return ps.Engine(config, **options)


def push(engine, keys, value=1.0, dim=4, **options):
    """Apply gradients of one value to keys."""
    return engine.apply({"user": (np.asarray(keys), np.full((len(keys), dim), value, np.float32))}, **options)


def log_of(steps, dim=4):
    """A record batch of a log. steps : of each step the keys of its rows"""
    keys = np.concatenate([np.asarray(keys_of_step, np.int64) for keys_of_step in steps])
    values = np.random.default_rng(len(keys)).standard_normal((len(keys), dim))
    return batch(keys, values, step=np.repeat(np.arange(len(steps)), [len(keys_of_step) for keys_of_step in steps]))


def timed(keys, times, steps=None):
    """One frame per row."""
    steps = range(len(keys)) if steps is None else steps
    return batch(keys, dim=4, step=pa.array(steps, pa.int64()), time=pa.array(times, pa.int64()))


def cut(batch, sizes):
    """The same rows in batches of these sizes, over and over."""
    batches, start, turn = [], 0, 0
    while start < batch.num_rows:
        batches.append(batch.slice(start, sizes[turn % len(sizes)]))
        start, turn = start + sizes[turn % len(sizes)], turn + 1
    return batches


def churning_steps(num_steps=60, num_keys=40, per_step=24, seed=0):
    """Keys that drift, so that old ones expire or are evicted; hashed over all 64 bits."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(num_steps):
        steps.append(hashed(step // 2 + rng.integers(0, num_keys, per_step)))
    return steps


def physical(engine, name="user"):
    """key → row of all keys that have one, also of expired keys that wait for their sweep."""
    table = engine.core.tables.dynamic[name]
    state = table.directory.state()
    rows = engine.core.tables.table(name).read(state["row"].astype(np.int64))
    return dict(zip(table.as_given(state["key"]).tolist(), rows.tolist(), strict=True))


def same_rows(left, right):
    """Assert that keys have the same rows, bit for bit."""
    assert left.keys() == right.keys()
    assert all(np.float32(left[key]).tobytes() == np.float32(right[key]).tobytes() for key in left)


class Reader:
    """A dictionary that follows deltas: key → row. clock, last : of the table, and of every key, as deltas say them"""

    def __init__(self, step=0):
        self.rows, self.step, self.ops = {}, step, {"upsert": 0, "delete": 0}
        self.clock, self.last = None, {}
        self._checksum, self._pending = None, []

    def take(self, batch):
        step, parent, checksum, left = (batch[name][0].as_py() for name in ("step", "parent", "checksum", "rows_left"))
        ops, ids = batch["op"].to_pylist(), batch["id"].to_pylist()
        assert ids == sorted(ids)
        if self._checksum is None:
            self._checksum = zlib.crc32(np.array([parent, step], "<i8").tobytes())
        crc = zlib.crc32(b"user\0", self._checksum)
        crc = zlib.crc32(np.array([i - 2**64 if i >= 2**63 else i for i in ids], "<i8").tobytes(), crc)
        crc = zlib.crc32(bytes(op == "delete" for op in ops), crc)
        self.clock = batch["clock"][0].as_py()
        assert batch["clock"].to_pylist() == [self.clock] * len(ids)
        crc = zlib.crc32(np.array([self.clock], "<i8").tobytes(), crc)
        if "last" in batch.schema.names:
            last = dict(zip(ids, batch["last"].to_pylist(), strict=True))
            kept = [last[key] for key, op in zip(ids, ops, strict=True) if op == "upsert"]
            crc = zlib.crc32(np.array(kept, "<i8").tobytes(), crc)
            self.last = {key: start for key, start in (self.last | last).items() if start is not None}
        rows = batch["row"].to_pylist()
        crc = zlib.crc32(np.array([row for row in rows if row is not None], "<f4").tobytes(), crc)
        for column in batch.schema.names[4 : batch.schema.names.index("op")]:
            values = [row for row in batch[column].to_pylist() if row is not None]
            crc = zlib.crc32(np.array(values, "<f4").tobytes(), crc)
        if crc != checksum:
            raise ValueError(f"delta {step}: its checksum differs")
        self._checksum = crc
        self._pending += zip(ids, ops, rows, strict=True)
        if left:
            return
        if parent != self.step:
            raise ValueError(f"delta {step} follows on {parent}, not on {self.step}")
        for key, op, row in self._pending:
            self.ops[op] += 1
            if op == "delete":
                assert row is None
                self.rows.pop(key, None)  # unknown where it came and went since the last delta
            else:
                self.rows[key] = row
        self._checksum, self._pending, self.step = None, [], step

    def follow(self, deltas):
        for delta in deltas:
            self.take(delta)
        return self
