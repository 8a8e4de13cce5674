"""What the tests of cached tables share: tables of every kind, a log for them, and placements of every size."""

import numpy as np
from batches import batch, lists
from engines import stored

import penstock as ps

DIMS = {"plain": 3, "keyed": 8, "halved": 13, "apart": 2}
ROWS = 300
OPTIMIZERS = {
    "plain": ps.Adagrad(0.1),
    "keyed": ps.RowWiseAdagrad(0.1),
    "halved": ps.Momentum(0.1),
    "apart": ps.SGD(0.5, use_gradient_accumulation=False),
}


def config_of(placement=lambda table: ps.Placement(), names=tuple(DIMS)):
    """placement : TableSpec → Placement"""
    bare = _config({name: ps.Placement() for name in names})
    return _config({name: placement(bare.table(name)) for name in names})


def _config(placements):
    tables = [
        ps.TableConfig(
            ROWS,
            DIMS[name],
            name=name,
            optimizer=OPTIMIZERS[name],
            dynamic=ps.Dynamic(evict="lru") if name == "keyed" else None,
            placement=placement,
        )
        for name, placement in placements.items()
    ]
    return stored(ps.EmbeddingConfig.from_tables(tables, num_required=2), {"halved"} & placements.keys())


def cached(share, look_ahead=0):
    """A placement with room for this share of a table's rows, at least one; of an int: for so many rows."""

    def placement(spec):
        rows = share if isinstance(share, int) else int(share * spec.vocabulary_size)
        return ps.Placement("cached", max(1, rows * spec.row_bytes), look_ahead)

    return placement


def log_of(steps=5, workers=2, rows=40, names=tuple(DIMS)):
    """Frames of several workers. Popular ids drift, and there are more keys than rows of the dynamic table."""
    batches = []
    for step, worker in ((step, worker) for step in range(steps) for worker in range(workers)):
        rng = np.random.default_rng([step, worker])
        for name in names:
            ids = (rng.zipf(1.2, rows) + 7 * step) % (ROWS if name != "keyed" else 2000)
            gradient = lists(rng.standard_normal((rows, DIMS[name])).astype(np.float32))
            batches.append(batch(ids, table=name, step=step, contributor=f"w{worker}", gradient=gradient))
    return batches


def counts(engine, name="plain"):
    """(hits, up, down) of a table since the last run began."""
    report = engine.core.table_reports()[name].cache
    return report.hits, report.up, report.down
