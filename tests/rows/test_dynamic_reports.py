"""Reports of dynamic tables, of resumed runs and while frames enter, and the memory that a load leaves."""

import gc
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
from dynamic import ALL_POLICIES, churning_steps, config_of, engine_of, log_of, push
from limits import in_thread
from services import client_of, service_of

import penstock as ps
from penstock.contrib.pages.metrics import Metrics
from penstock.pyx.keys.directory_plan import Plan

ROWS = 1 << 18  # counted in four parts


@pytest.fixture
def entering(monkeypatch):
    """entering(engine): while its expired keys are counted, another thread pushes a frame before every part."""

    def begin(engine):
        still, parts = engine.gate.still, []
        table = engine.core.tables.dynamic["user"]

        @contextmanager
        def part():
            parts.append(in_thread(lambda: push(engine, [len(parts)]))())
            with still():
                yield

        count = type(engine.core.tables.dynamic).expired_waiting
        monkeypatch.setattr(type(engine.core.tables.dynamic), "expired_waiting", lambda self, _: count(self, part))
        assert table.directory.num_shards == 64
        return parts

    return begin


def expired_engine():
    engine = engine_of(ps.Dynamic(expire_after=9), rows=ROWS, num_required=1)
    push(engine, range(1000, 1100))
    for _ in range(12):
        push(engine, [1])
    return engine


def test_frames_enter_while_metrics_count_the_expired_keys(entering):
    engine = expired_engine()
    parts = entering(engine)
    actual = Metrics(engine).plain()
    assert len(parts) == 4
    assert engine.global_step == 13 + 4
    assert 0 < actual["penstock_table_expired_waiting_keys"]["user"] <= 100
    assert actual["penstock_global_steps"] == 17


def test_frames_enter_while_the_service_counts_the_expired_keys(entering):
    engine = expired_engine()
    with service_of(engine) as service, client_of(service) as client:
        parts = entering(engine)
        status = client.status()
    assert len(parts) == 4
    assert status["global_step"] == 17
    assert 0 < status["keys"]["user"]["expired_waiting"] <= 100


@pytest.mark.parametrize("loaded", [False, True])
def test_neither_a_load_nor_a_step_leaves_its_plan(loaded):
    engine = engine_of(rows=8, optimizer=ps.SGD(0.1))
    gc.collect()
    before = sum(isinstance(item, Plan) for item in gc.get_objects())
    if loaded:
        engine.load_parameters("user", np.ones((3, 4), np.float32), ids=[1, 2, 3])
    else:
        push(engine, [1, 2, 3])
    gc.collect()
    assert sum(isinstance(item, Plan) for item in gc.get_objects()) == before
    assert engine.keys("user").to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("limit", [1, 7, 20, 33])
def test_the_reports_of_an_interrupted_run_add_up_to_that_of_the_unbroken_one(tmp_path, limit):
    log = log_of(churning_steps(40))
    whole = asdict(ps.Engine(config_of(ALL_POLICIES, rows=32), num_required=2).run([log]).tables["user"].keys)
    first = ps.Engine(config_of(ALL_POLICIES, rows=32), num_required=2)
    begun = asdict(first.run([log], checkpoint=tmp_path, limit=limit, every=3).tables["user"].keys)
    again = ps.Engine.restore(tmp_path)
    ended = asdict(again.run([log], checkpoint=tmp_path, resume=True, every=3).tables["user"].keys)
    for number in ("keys", "load", "waiting", "expired_waiting"):
        assert ended[number] == whole[number]
    for number in ("admitted", "expired", "evicted", "returned", "rejected", "unadmitted_rows"):
        assert begun[number] + ended[number] == whole[number]
    assert whole["returned"] > 0
