"""Rounds: one hash for any order in which the frames of workers arrive, over commits and resumes."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field

import evidence
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps

ROWS, DIM = 12, 2
TABLES = {
    "plain": {"optimizer": ps.Adagrad(0.1)},
    "separate": {"optimizer": ps.Adagrad(0.1, use_gradient_accumulation=False)},
    "not lazy": {"optimizer": ps.Adam(0.1, lazy_adam=False)},
    "keyed": {"optimizer": ps.Adagrad(0.1), "dynamic": ps.Dynamic()},
    "cached": {"optimizer": ps.Adagrad(0.1), "placement": ps.Placement("cached", device_bytes=100, look_ahead=2)},
}
CONFIGS = {
    name: ps.EmbeddingConfig.from_tables([ps.TableConfig(ROWS, DIM, name="t", **options)])
    for name, options in TABLES.items()
}


@dataclass
class Case:
    """Frames of workers, and the order in which they arrive. streams : by worker, (step or None, ids, gradients)"""

    streams: list
    order: list  # workers
    table: str
    reduction: str
    saves: set = field(default_factory=set)  # numbers of frames before which the engine is saved and restored


@st.composite
def cases(draw):
    count = draw(st.integers(2, 5))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    streams = []
    for worker in range(count):
        stream, step = [], 0
        for _ in range(draw(st.integers(0, 8))):
            kind = draw(st.sampled_from(["next", "next", "next", "next", "gap", "second", "stale", "empty", "any"]))
            if kind == "gap" and worker:  # the first worker has one of every step: some worker must
                step += draw(st.integers(1, 2))
            num = 0 if kind == "empty" else int(seed.integers(1, 5))
            ids, grads = seed.integers(0, ROWS, num), seed.normal(size=(num, DIM)).astype(np.float32)
            if kind == "second" and step:
                stream.append((step - 1, ids, grads))
            elif kind == "stale" and step > 1:
                stream.append((step - 2, ids, grads))
            else:
                stream.append((None if kind == "any" else step, ids, grads))
                step += 1
        streams.append(stream)
    order = draw(st.permutations([worker for worker, stream in enumerate(streams) for _ in stream]))
    saves = draw(st.sets(st.integers(0, len(order)), max_size=2))
    return Case(
        streams, list(order), draw(st.sampled_from(list(TABLES))), draw(st.sampled_from(["sum", "mean"])), saves
    )


def expected(case):
    """Return the frames of every step by worker, as the turns of rounds are defined."""
    queues, steps = [list(stream) for stream in case.streams], []
    while True:
        step, taken = len(steps), {}
        for worker, queue in enumerate(queues):
            while queue and queue[0][0] is not None and queue[0][0] < step:
                queue.pop(0)  # stale
            if not queue:
                return steps
            if queue[0][0] in (None, step):
                taken[worker] = queue.pop(0)
        steps.append(taken)


def check(case):
    names = [f"rank-{worker}" for worker in range(len(case.streams))]
    config = CONFIGS[case.table]
    message = config.to_engine_proto()
    message.gate.rounds.workers, message.gate.rounds.ahead = len(names), 100
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(message), reduction=case.reduction)
    sent, results = [0] * len(names), Counter()
    for number, worker in enumerate([*case.order, None]):
        if number in case.saves:
            with tempfile.TemporaryDirectory() as folder:
                engine.save(folder)
                engine = ps.Engine.restore(folder)
        if worker is None:
            break
        step, ids, grads = case.streams[worker][sent[worker]]
        sent[worker] += 1
        buffer = grads.copy()
        results[engine.apply({"t": (ids, buffer)} if len(ids) else {}, local_step=step, contributor=names[worker])] += 1
        buffer[:] = np.nan  # the caller's memory is its own again
    steps = expected(case)
    reference = ps.Engine(config, num_required=len(names), reduction=case.reduction)
    for taken in steps:
        for worker in range(len(names)):
            _, ids, grads = taken.get(worker, (None, [], []))
            reference.apply({"t": (ids, grads)} if len(ids) else {}, contributor=names[worker])
    assert engine.global_step == reference.global_step == len(steps)
    assert engine.state_hash() == reference.state_hash()
    applied = sum(map(len, steps))
    assert results[True] == applied + engine.gate.num_accumulated
    assert results[False] == engine.gate.stale.total


@evidence.examples(2000, 50)
@given(cases())
def test_any_order_of_arrival_gives_the_sums_in_the_order_of_the_workers(case):
    check(case)
