"""Rows whose weights or slots an update makes infinite or NaN are counted, once each, and the first one is named."""

import logging
from functools import partial

import engines
import numpy as np
import pyarrow as pa
import pytest
from every_optimizer import EVERY, NON_LAZY, named

import penstock as ps
import penstock.core.engine_core
from penstock.rows.bridge.devices import HostMesh

NUM_ROWS, DIM = 20, 3
# Gradients whose squares, sums of steps or quotients leave the finite range with some optimizer.
VALUES = np.array([0.0, 1.0, -1.0, 3e19, -3e38, 1e-30], np.float32)


engine_of = partial(engines.engine_of, dim=DIM, rows=NUM_ROWS, initializer=ps.Constant(1.0))


def rows_not_finite(engine):
    parts = [engine.table("t"), *engine.slots("t").values()]
    return {int(row) for part in parts for row in np.flatnonzero(~np.isfinite(part).all(axis=1))}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("optimizer", EVERY + NON_LAZY, ids=named(EVERY + NON_LAZY))
def test_every_row_that_became_so_counts_once(optimizer, native, monkeypatch):
    monkeypatch.setattr(penstock.core.engine_core, "SMALL_ROWS", 4096 if native else 0)
    rng, engine, ever, first = np.random.default_rng(7), engine_of(optimizer), set(), ""
    for step in range(6):
        ids = rng.permutation(NUM_ROWS - 2)[:6]
        values = rng.choice(VALUES[:3] if step < 2 else VALUES, (6, DIM))
        engine.apply({"t": (ids, values)})
        bad = rows_not_finite(engine)
        first = first or (f"table 't', id {min(bad)}" if bad else "")
        ever |= bad
    counters = engine.core.counters
    assert (counters.not_finite, counters.first_not_finite) == (len(ever), first)


def log_of(steps):
    rows = [(row_id, [value] * DIM, step) for step, frame in enumerate(steps) for row_id, value in frame]
    return pa.table(
        {
            "id": [row_id for row_id, _, _ in rows],
            "gradient": pa.array([gradient for _, gradient, _ in rows], pa.list_(pa.float32(), DIM)),
            "step": [step for _, _, step in rows],
        }
    )


LOG = [[(5, 1.0)], [(7, 3e19), (3, 3e19), (4, 1.0)], [(7, 1.0), (9, 3e19)]]


def test_the_report_its_notes_and_the_log_name_the_first_row(caplog):
    with caplog.at_level(logging.WARNING, "penstock"):
        report = engine_of(ps.Adagrad(0.1)).run(log_of(LOG))
    assert (report.not_finite, report.first_not_finite) == (3, "table 't', id 3")
    assert report.to_dict()["not_finite"] == 3
    assert report.notes == ("3 rows became infinite or NaN by updates; first: table 't', id 3 (docs/bad_rows.md)",)
    (record,) = [record.message for record in caplog.records if record.message.startswith("not_finite")]
    assert record.startswith('not_finite table="t" id=3 ')


def test_a_run_of_finite_updates_reports_none():
    report = engine_of(ps.Adagrad(0.1)).run(log_of([[(5, 1.0), (5, 1e18)], [(1, -1e18)]]))
    assert (report.not_finite, report.first_not_finite, report.notes) == (0, "", ())


def test_a_row_that_is_loaded_again_counts_again():
    engine = engine_of(ps.Adagrad(0.1))
    for _ in range(2):
        engine.apply({"t": ([5], np.full((1, DIM), 3e19, np.float32))})
    assert engine.core.counters.not_finite == 1
    ones = np.ones((NUM_ROWS, DIM), np.float32)
    engine.load_parameters("t", ones, **dict.fromkeys(engine.slots("t"), ones))
    engine.apply({"t": ([5], np.full((1, DIM), 3e19, np.float32))})
    assert engine.core.counters.not_finite == 2


def test_a_checkpoint_keeps_the_count_and_the_rows(tmp_path):
    options = {"checkpoint": tmp_path / "ck"}
    log = log_of([*LOG[:2], LOG[2][1:]])
    engine_of(ps.Adagrad(0.1)).run(log, limit=2, **options)
    engine = ps.Engine.restore(tmp_path / "ck")
    assert rows_not_finite(engine) == {3, 7}
    report = engine.run(log, resume=True, **options)
    assert (report.not_finite, report.first_not_finite) == (1, "table 't', id 9")
    totals = ps.Engine.restore(tmp_path / "ck").session.ledger.totals
    assert (totals.not_finite, totals.first_not_finite) == (3, "table 't', id 3")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("share", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("strategy", [0, 1])
def test_rows_are_named_by_their_ids_wherever_they_lie(share, strategy, devices):
    table = ps.TableConfig(NUM_ROWS, DIM, ps.Constant(1.0), ps.Adagrad(0.1), name="t")
    message = ps.EmbeddingConfig.from_tables([table]).to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = strategy
    config = ps.EmbeddingConfig.from_proto(message)
    for row_id in (0, 3, 4, 9, 10, 19):
        report = ps.Engine(config, HostMesh(devices), share=share).run(log_of([[(row_id, 3e19)], [(row_id, 1.0)]]))
        owner = row_id % 2 if strategy else row_id // 10
        is_own = share is None or share[0] == owner
        assert (report.not_finite, report.first_not_finite) == ((1, f"table 't', id {row_id}") if is_own else (0, ""))


@pytest.mark.parametrize(("key_type", "key"), [("int64", -5), ("uint64", 2**63 + 5)])
def test_the_key_of_a_dynamic_table_is_named(key_type, key):
    dynamic = ps.Dynamic(key_type=key_type)
    table = ps.TableConfig(NUM_ROWS, DIM, ps.Constant(1.0), ps.Adagrad(0.1), name="t", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    engine.apply({"t": ([2**40, key], np.array([[1.0] * DIM, [3e19] * DIM], np.float32))})
    assert engine.core.counters.first_not_finite == f"table 't', id {key}"
