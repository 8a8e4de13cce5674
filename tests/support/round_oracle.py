"""Cases of rounds: frames of workers in an order of arrival, and the frames of every step, as turns are defined."""

from dataclasses import dataclass, field

import numpy as np
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
