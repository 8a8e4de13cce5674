"""A configuration with tables that look ahead, and the record of what they are told of the future."""

import numpy as np
from batches import batch

import penstock as ps

SETS = {
    "near": ps.Placement("cached", device_bytes=400, look_ahead=1),
    "far": ps.Placement("cached", device_bytes=400, look_ahead=4),
    "blind": ps.Placement("cached", device_bytes=400, look_ahead=0),
    "plain": ps.Placement(),
}
CLOSE = {"near": 1, "far": 4}


def config_of(optimizer=None, dynamic=None):
    optimizer = optimizer or ps.Adagrad(0.1)
    tables = [
        ps.TableConfig(500, 2, name=name, placement=placement, dynamic=dynamic) for name, placement in SETS.items()
    ]
    return ps.EmbeddingConfig.from_tables(tables, optimizer)


def batches(num_steps=12, workers=1, seed=0):
    """Frames of random tables; of several workers the last lags behind now and then, so that its frames are stale."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        for worker in range(workers):
            late = 3 * (worker > 0 and worker == workers - 1 and step % 5 == 4)
            for name in np.array(list(SETS))[rng.random(len(SETS)) < 0.7]:
                ids = rng.integers(0, 500, rng.integers(1, 30))
                yield batch(ids, step=step - late, table=name, contributor=f"w{worker}")


class Uses:
    """Records what tables are told of the future, and what then happens."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.happened, self.known = engine, {name: [] for name in SETS}, []
        self.uses_ahead = {name: [] for name in SETS}
        tables = engine.core.tables
        apply, foresee, forget = tables.apply, tables.foresee, tables.forget_foreseen
        self.num_forgotten = 0

        def applied(coalesced, rates, step):
            # What is known of each table at this step: the uses that it was told of and that have not happened yet.
            self.known.append({name: [*uses_ahead] for name, uses_ahead in self.uses_ahead.items()})
            for name, several in coalesced.items():
                uses = [np.concatenate([part.ids for part in item.summed]).tolist() for item in several]
                self.happened[name].append(uses)
                del self.uses_ahead[name][: len(uses)]
            return apply(coalesced, rates, step)

        def foreseen(name, rows):
            self.uses_ahead[name].append(rows.tolist())
            foresee(name, rows)

        def forgotten():
            self.num_forgotten += 1
            for uses_ahead in self.uses_ahead.values():
                uses_ahead.clear()
            forget()

        for name, spied in (("apply", applied), ("foresee", foreseen), ("forget_foreseen", forgotten)):
            monkeypatch.setattr(tables, name, spied)

    def assert_known(self, steps=None):
        """At every step each table knew the uses of as many openings as it looks ahead, and no others."""
        num_steps = len(self.known)
        assert num_steps > 3
        for step in range(num_steps) if steps is None else steps:
            for name in SETS:
                end = step + CLOSE[name] + 1 if name in CLOSE else step
                expected = [use for opening in self.happened[name][step:end] for use in opening]
                assert [sorted(use) for use in self.known[step][name]] == [sorted(use) for use in expected]
