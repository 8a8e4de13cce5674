"""One state hash, whatever cuts the batches, shares the work or interrupts the run, while keys come and go."""

import itertools

import numpy as np
import pytest
from dynamic import churning_steps, config_of, cut, engine_of, log_of, push

import penstock as ps
from penstock.core import pipeline

POLICIES = {
    "lru": ps.Dynamic(min_count=2, expire_after=3, evict="lru"),
    "lfu": ps.Dynamic(min_count=2, count="frames", forget_after=5, expire_after=3, evict="lfu", half_life=4),
    "chance": ps.Dynamic(probability=0.4, expire_after=3, evict="lru", on_full="reject"),
}
CUTS, THREADS, DEVICES = ([10_000], [7], [1, 100, 3]), (1, 2, 8), (1, 3, 8)
# Every value of one meets every value of the others.
WAYS = [(c, t, d) for c, t, d in itertools.product(range(3), range(3), range(3)) if (c + t + d) % 3 == 0]


def bursts(num_steps):
    """Six steps of many keys, then four of few, during which keys expire."""
    return [keys[: 24 if step % 10 < 6 else 3] for step, keys in enumerate(churning_steps(num_steps))]


@pytest.fixture(params=POLICIES)
def dynamic(request):
    return POLICIES[request.param]


@pytest.fixture
def small_parts(monkeypatch):
    """Frames of a few rows are summed in parts, by several threads."""
    monkeypatch.setattr(pipeline, "ROWS_WORTH_SPLITTING", 4)


def outcome(engine):
    """The state hash, and what became of keys, of which every policy has something to do."""
    entry = engine.core.tables.dynamic["user"].directory
    assert entry.counts["evicted"] >= entry.counts["admitted"] / 5
    assert entry.counts["expired"] > 0 < entry.counts["unadmitted_rows"]
    return engine.state_hash(), *entry.counts.values()


@pytest.mark.promise("The bits depend on no record batches, threads or number of devices")
def test_batches_threads_and_devices_decide_nothing(dynamic, mesh_of, small_parts):
    log, outcomes = log_of(bursts(60)), set()
    for sizes, threads, devices in ((CUTS[c], THREADS[t], DEVICES[d]) for c, t, d in WAYS):
        engine = ps.Engine(config_of(dynamic, rows=28), mesh_of(devices), num_required=2, threads=threads)
        engine.run(cut(log, sizes), flush=True)
        outcomes.add(outcome(engine))
    assert len(outcomes) == 1


@pytest.mark.evidence
def test_a_run_that_resumes_after_every_frame_ends_like_the_unbroken_one(dynamic, mesh_of, small_parts, tmp_path):
    """Each time with other batches, and with other numbers of threads and devices: 1, 2, 4, 3, 8 in turn."""
    log = log_of(bursts(61))
    whole = ps.Engine(config_of(dynamic, rows=28), num_required=2)
    whole.run([log])
    assert whole.gate.num_accumulated == 1  # also the gate is half full where a run ends
    engine = ps.Engine(config_of(dynamic, rows=28), mesh_of(1), num_required=2)
    for frames in range(1, 62):
        sizes, threads = CUTS[frames % 3], THREADS[frames // 3 % 3]
        engine.run(cut(log, sizes), checkpoint=tmp_path, limit=frames, resume=frames > 1)
        engine = ps.Engine.restore(tmp_path, mesh_of((1, 2, 4, 3, 8)[frames % 5]), threads)
    assert outcome(engine) == outcome(whole)
    assert engine.gate.get_state() == whole.gate.get_state()


def test_steps_of_many_keys_are_decided_by_all_threads(mesh_of):
    rng = np.random.default_rng(4)
    steps = [(rng.integers(0, 90_000, 60_000) + 15_000 * step) * 0x9E3779B97F4A7C1 for step in range(7)]
    log, outcomes = log_of(steps, dim=1), set()
    for threads, devices in ((1, 8), (2, 1), (8, 3)):
        config = config_of(ps.Dynamic(min_count=2, expire_after=1, evict="lru"), rows=40_000, dim=1)
        engine = ps.Engine(config, mesh_of(devices), threads=threads)
        engine.run(cut(log, [50_000]))
        assert engine.core.tables.dynamic["user"].directory.num_shards == 8
        outcomes.add(outcome(engine))
    assert len(outcomes) == 1


def test_when_memory_is_swept_decides_nothing_but_the_deletes(dynamic):
    steps, seen = bursts(40), []
    everything = np.unique(np.concatenate(steps))
    for period in (1024, 1, 0, 7):
        engine, states = engine_of(dynamic, rows=24), []
        engine.core.tables.dynamic["user"].directory._sweep_every(period)
        deltas = engine.stage([log_of(steps)])
        upserts = [[row for row in batch.to_pylist() if row["op"] == "upsert"] for batch in deltas]
        engine = engine_of(dynamic, rows=24)
        engine.core.tables.dynamic["user"].directory._sweep_every(period)
        for step, keys in enumerate(steps):
            push(engine, keys, float(step))
            states.append((engine.state_hash(), engine.keys("user").to_pylist()))
            states.append(engine.lookup("user", everything).tobytes())
        seen.append(([upsert for upsert in upserts if upsert], states))
    assert seen[0] == seen[1] == seen[2] == seen[3]
