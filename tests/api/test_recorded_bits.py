"""The bits of tables, deltas and activations against recorded ones, so that no change of the code changes them.

The records were made by the first complete engine and have never been made anew. Where a change must alter bits
(a corrected fault), it says so in docs/decisions and records the case again: python tests/api/test_recorded_bits.py
"""

import hashlib
import inspect
import json
import struct
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from jax.sharding import Mesh

import penstock as ps


def hash_of_wide_slots(engine):
    """The state hash of the time when a slot of one number per row repeated it in every column."""
    digest = hashlib.sha256()
    for name in sorted(engine.config.table_names):
        weights, *slots = engine.retrieve_parameters(name).values()
        digest.update(name.encode() + b"\0" + struct.pack("<qq", *weights.shape))
        for part in (weights, *slots):
            digest.update(np.broadcast_to(part, weights.shape).astype("<f4").tobytes())
    digest.update(struct.pack("<q", engine.global_step))
    return digest.hexdigest()


RECORDS = Path(__file__).parents[1] / "data" / "recorded_bits.json"
VOCABULARIES = {"user": 500, "item": 90}
DIM = 8
OPTIMIZERS = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "BoundedAdagrad",
    "CenteredRMSProp",
    "FTRL",
    "Lion",
    "Momentum",
    "OnlineYogi",
    "PartialRowWiseAdam",
    "ProximalAdagrad",
    "ProximalYogi",
    "RMSProp",
    "RowWiseAdagrad",
    "TorchAdagrad",
]
GATES = [(1, 1, "mean"), (3, 2, "sum"), (4, 3, "mean")]  # devices, num_required, reduction


def numbers(count, seed):
    """uint64 numbers that no version of NumPy draws otherwise: a multiplicative hash of 0, 1, 2, …"""
    x = (np.arange(count, dtype=np.uint64) + np.uint64(1 + 7919 * seed)) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def rows(count, vocabulary, seed):
    """Ids of which few make up most, and gradients in [-1, 1)."""
    drawn = numbers(count, seed)
    ids = (drawn >> np.uint64(11)) % np.uint64(vocabulary) // (1 + drawn % np.uint64(9))
    values = (numbers(count * DIM, seed + 1) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    return ids.astype(np.int64), values


def log(contributors, seed, bad=False):
    batches = []
    for step, contributor in np.ndindex(12, contributors):
        for number, (table, vocabulary) in enumerate(VOCABULARIES.items()):
            count = 20 + 13 * ((step + contributor) % 11)
            ids, values = rows(count, vocabulary, seed + 100 * step + 10 * contributor + number)
            if bad and step % 4 == 1:
                values[0], ids[-1] = np.nan, vocabulary + 3
            values = values.reshape(-1, DIM)
            batches.append(batch(ids, values, table=table, step=step, contributor=contributor))
    return pa.RecordBatchReader.from_batches(batches[0].schema, batches)


def config_of(optimizer):
    tables = [ps.TableConfig(size, DIM, name=name, optimizer=optimizer) for name, size in VOCABULARIES.items()]
    return ps.EmbeddingConfig.from_features([ps.FeatureConfig(t, name=t.name) for t in tables], batch_size=16)


def tables_after(name, devices, num_required, reduction):
    kind = getattr(ps, name)
    required = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    optimizer = kind(**({"learning_rate": 0.05} | dict.fromkeys(required, 0.9)))
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("x",))
    engine = ps.Engine(config_of(optimizer), mesh=mesh, num_required=num_required, reduction=reduction, seed=3)
    engine.run(log(num_required, num_required))
    return hash_of_wide_slots(engine) if name == "RowWiseAdagrad" else engine.state_hash()


def dropped_rows():
    engine = ps.Engine(config_of(ps.Adagrad(0.1)), seed=1)
    report = engine.run(log(1, 5, bad=True), on_bad_row="drop")
    return [engine.state_hash(), dict(report.dropped)]


def flushed_gate():
    engine = ps.Engine(config_of(ps.Adagrad(0.1)), num_required=2, seed=1)
    report = engine.run(log(3, 8), flush=True)
    return [engine.state_hash(), report.stale, report.steps]


def deltas():
    engine = ps.Engine(config_of(ps.Adam(0.1)), num_required=2, seed=2)
    digest = hashlib.sha256()
    for delta in engine.stage(log(2, 4)):
        for column in delta.columns:
            digest.update(repr(column.to_pylist()).encode())
    return [digest.hexdigest(), engine.state_hash()]


def activations():
    engine = ps.Engine(config_of(ps.FTRL(0.1)), seed=2)
    digest = hashlib.sha256()
    for step in range(5):
        users = (numbers(16, step) % np.uint64(500)).astype(np.int32)
        items = [[int(i) for i in numbers(length % 5, length) % np.uint64(90)] for length in range(step, step + 16)]
        got, dedup = engine.recv_activations([users, items])
        for item in got:
            digest.update(np.asarray(item).tobytes())
        engine.send_gradients([np.asarray(entry) * np.float32(0.5) for entry in got], deduplication_data=dedup)
    return [digest.hexdigest(), engine.state_hash()]


CASES = {f"{name} {d} {n} {r}": (tables_after, name, d, n, r) for name in OPTIMIZERS for d, n, r in GATES}
CASES |= {item.__name__: (item,) for item in (dropped_rows, flushed_gate, deltas, activations)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.promise("The same frames give the same state hash in every version and on every CPU")
def test_the_bits_are_those_recorded(case):
    make, *arguments = CASES[case]
    assert make(*arguments) == json.loads(RECORDS.read_text())[case]


def test_every_record_is_compared():
    assert set(json.loads(RECORDS.read_text())) == set(CASES)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    made = {case: make(*arguments) for case, (make, *arguments) in CASES.items()}
    RECORDS.write_text(json.dumps(made, indent=1) + "\n")
