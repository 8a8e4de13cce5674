"""A real gradient log (skip-gram over Shakespeare), replayed through the engine against plain NumPy."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from batches import batch
from engines import engine_of
from oracle import adagrad, coalesce

from penstock.core.observers import StepObserver
from penstock.model.updates import Adagrad

LR, DIM, WORDS = 0.1, 8, 1083
MODES = list(itertools.product([1, 3], ["mean", "sum"], [("center",), ("center", "context")]))


@pytest.fixture
def log(shared):
    return pa.ipc.open_stream(shared("realdata/shakespeare_words.arrows")).read_all()


def only(log, tables):
    names = log["table"].cast(pa.string())
    return log.filter(pa.compute.is_in(names, pa.array(tables)))


def frames_of(log):
    """[{table: [(id, gradient row), …]}, …] by step, straight from Python lists."""
    frames = {}
    grads = np.stack(log["grad"].to_numpy())
    for row, (step, table, i) in enumerate(
        zip(log["step"].to_pylist(), log["table"].to_pylist(), log["id"].to_pylist(), strict=True)
    ):
        frames.setdefault(step, {}).setdefault(table, []).append((i, grads[row]))
    return [frames[step] for step in sorted(frames)]


@pytest.mark.parametrize(("num_required", "reduction", "tables"), MODES)
def test_every_step_equals_a_plain_numpy_loop_row_for_row(log, num_required, reduction, tables):
    frames = frames_of(only(log, tables))
    engine = engine_of(Adagrad(LR), tables, DIM, WORDS, num_required=num_required, reduction=reduction)
    spy = StepSpy()
    engine.core.observe(spy)
    for start in range(0, len(frames) - num_required + 1, num_required):
        group = frames[start : start + num_required]
        before = {t: engine.retrieve_parameters(t) for t in tables}
        engine.run([batch_of(start + n, frame) for n, frame in enumerate(group)])
        for table in tables:
            wanted = coalesce([frame.get(table, []) for frame in group], reduction)
            got = dict(zip(spy.seen[table][0].tolist(), spy.seen[table][1], strict=True))
            assert list(got) == list(wanted)
            assert all(got[i].tobytes() == wanted[i].tobytes() for i in wanted)  # coalesced sums: exactly
            weights, accumulators = before[table]["parameters"], before[table]["accumulators"]
            for i, g in wanted.items():
                weights[i], (accumulators[i],) = adagrad(np.float32(LR), g, weights[i], accumulators[i])
            after = engine.retrieve_parameters(table)
            assert after["parameters"].tobytes() == weights.tobytes()
            assert after["accumulators"].tobytes() == accumulators.tobytes()
    assert engine.global_step == len(frames) // num_required


def batch_of(step, frame):
    """One frame as a record batch, from the oracle's lists."""
    tables = [table for table, rows in frame.items() for _ in rows]
    ids, values = zip(*(row for rows in frame.values() for row in rows), strict=True)
    return batch(ids, values, step=step, table=tables)


class StepSpy(StepObserver):
    """What every step hands to the tables, by table: the coalesced ids and sums of the latest."""

    def __init__(self):
        self.seen = {}

    def before_step(self, coalesced):
        for name, (rows,) in ((name, rows) for name, rows in coalesced.items() if rows):
            self.seen[name] = tuple(np.concatenate(item) for item in zip(*rows.parts, strict=True))
