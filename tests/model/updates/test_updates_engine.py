"""Every optimizer through the engine, on one and on four devices, against the equations in NumPy: bit for bit."""

from functools import partial

import device_table
import engines
import numpy as np
import pytest
from engines import parts_of, same
from every_optimizer import EVERY, NON_LAZY, named

import penstock.updates as o
from penstock.api.engine import Engine
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig

# One row for each of the layout's shards, so that four devices share them evenly.
ROWS = 1024


def changed(optimizer, **arguments):
    """The same optimizer with other switches."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer) | arguments)
    return copy


engine_of = partial(engines.engine_of, dim=3, rows=ROWS)


def stepped(engine, parts, ids, grads, name="t"):
    """All parts of a table after the first step."""
    spec = engine.config.table(name)
    return device_table.stepped(spec.rule, spec.rule.rate_at(spec.learning_rate, 0), parts, ids, grads)


def some(rng, count, dim):
    return rng.permutation(ROWS)[:count], rng.standard_normal((count, dim), np.float32)


@pytest.mark.parametrize("optimizer", EVERY, ids=named(EVERY))
def test_without_accumulation_every_frame_is_coalesced_and_applied_by_itself_undivided(optimizer):
    engine = engine_of(changed(optimizer, use_gradient_accumulation=False), num_required=2, reduction="mean")
    parts, rng = parts_of(engine), np.random.default_rng(0)
    wanted = parts
    for start in (0, 10):  # rows 10 to 19 are in both frames
        ids = np.arange(start, start + 20)
        grads = rng.standard_normal((25, 3), np.float32)
        engine.apply({"t": (np.concatenate([ids, ids[:5]]), grads)})
        summed = grads[:20].copy()
        summed[:5] += grads[20:]
        wanted = stepped(engine, wanted, ids, summed)
        assert engine.global_step == (1 if start else 0)
    assert same(parts_of(engine), wanted)


# ---- not lazy


def two_tables(optimizer, mesh):
    tables = [TableConfig(2000, 3, name="touched"), TableConfig(1003, 5, name="other")]
    return Engine(EmbeddingConfig.from_tables(tables, optimizer), mesh)


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("optimizer", NON_LAZY, ids=named(NON_LAZY))
def test_a_step_moves_every_row_of_every_table_where_the_optimizer_is_not_lazy(optimizer, devices, mesh_of):
    engine, rng = two_tables(optimizer, mesh_of(devices)), np.random.default_rng(0)
    wanted = {name: parts_of(engine, name) for name in ("touched", "other")}
    grads = rng.standard_normal((1003, 5), np.float32)
    for step in range(3):
        # The other table has gradients once, then none.
        frame = {"touched": (np.arange(step, 900), rng.standard_normal((900 - step, 3), np.float32))}
        frame |= {"other": (np.arange(1003), grads)} if step == 0 else {}
        for name, parts in wanted.items():
            ids, rows = frame.get(name, (np.zeros(0, int), np.zeros((0, parts[0].shape[1]), np.float32)))
            wanted[name] = stepped(engine, parts, ids, rows, name)
        before = engine.lookup("other", [7])
        engine.apply(frame)
        assert engine.lookup("other", [7]).tolist() != before.tolist()
    assert all(same(parts_of(engine, name), parts) for name, parts in wanted.items())


@pytest.mark.parametrize("optimizer", EVERY, ids=named(EVERY))
def test_a_lazy_optimizer_leaves_untouched_rows_alone(optimizer):
    engine = engine_of(optimizer)
    before = parts_of(engine)
    engine.apply({"t": (np.array([5]), np.ones((1, 3), np.float32))})
    after = parts_of(engine)
    rest = np.delete(np.arange(ROWS), 5)
    assert all(b[rest].tobytes() == a[rest].tobytes() for b, a in zip(before, after, strict=True))
    assert after[0][5].tolist() != before[0][5].tolist()


# ---- what does not depend on anything


@pytest.mark.parametrize("dim", [1, 4])
def test_low_dimensional_packing_changes_no_result(dim):
    ids, grads = some(np.random.default_rng(0), 40, dim)
    engines = [engine_of(o.Adam(0.1, low_dimensional_packing_status=packing), dim=dim) for packing in (False, True)]
    for engine in engines:
        engine.apply({"t": (ids, grads)})
    assert engines[0].state_hash() == engines[1].state_hash()
