"""``penstock bench``: what is measured, and that wrong results are seen. No timing is asserted."""

import re
import sys

import numpy as np
import pytest

from penstock.bench import (
    cases,
    check,
    compare,
    contestants,
    doput,
    interleave,
    machine,
    memory_bandwidth,
    penstock_adapter,
    roofline,
    runner,
)
from penstock.bench.distributions import spread, uniform, zipf
from penstock.bench.peers import jax_peer, numpy_peer
from penstock.bench.report.summary_table import cell_of, peers_of
from penstock.bench.workloads import TableSize, Workload, make

WAYS = numpy_peer.ways(1) + jax_peer.ways(1)


@pytest.fixture
def workload():
    """Two tables of different dims, two steps, batches that end in the middle of a table."""
    tables = (TableSize("a", 500, 8, 700, zipf(1.1)), TableSize("b", 90, 3, 300, uniform))
    return Workload("two", "two tables", tables, num_steps=2, batch_rows=256)


# ---- what is drawn


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4"])
def test_a_workload_is_the_same_every_time_and_inside_its_tables(name):
    first, again = (make(name, rows=20_000, scale=1 / 500).steps() for _ in range(2))
    for step, same in zip(first, again, strict=True):
        assert np.array_equal(step.ids, same.ids)
        assert np.array_equal(step.values, same.values)
        for table in step.workload.tables:
            ids, grads = step.parts[table.name]
            assert grads.shape == (len(ids), table.dim)
            assert ids.min() >= 0
            assert ids.max() < table.vocabulary_size
    assert not np.array_equal(first[0].ids, first[1].ids)
    assert first[0].ids.ctypes.data % 64 == first[0].values.ctypes.data % 64 == 0


def test_the_batches_of_a_step_are_its_rows_in_order(workload):
    for step in workload.steps():
        assert [batch.num_rows for batch in step.batches] == [256, 256, 256, 232]
        ids = np.concatenate([batch["id"].to_numpy() for batch in step.batches])
        assert np.array_equal(ids, step.ids)
        rows = [row for batch in step.batches for row in batch["gradient"].to_pylist()]
        assert np.array_equal(np.concatenate(rows).astype(np.float32), step.values)
        tables = [name for batch in step.batches for name in batch["table"].to_pylist()]
        assert tables == ["a"] * 700 + ["b"] * 300


def test_spread_is_a_bijection():
    assert len(np.unique(spread(np.arange(10_000), 10_000))) == 10_000


@pytest.mark.parametrize("size", [1000, 1 << 16, 300_000])
def test_zipf_ids_are_as_frequent_as_zipf_says(size):
    ids = zipf(1.1)(np.random.default_rng(0), 400_000, size)
    weights = np.arange(1, size + 1) ** -1.1
    counts = np.bincount(ids, minlength=size)[spread(np.arange(size), size)]
    # Grouped by powers of two of the rank, so that every group has thousands of draws.
    edges = np.unique(np.minimum(2 ** np.arange(20), size)) - 1
    wanted = np.add.reduceat(weights, edges[:-1]) / weights.sum() * len(ids)
    got = np.add.reduceat(counts, edges[:-1])
    assert np.abs(got - wanted).max() < 5 * np.sqrt(wanted.max())


# ---- who is right


@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_first_step_of_penstock_is_right(workload, kind, tmp_path):
    steps = workload.steps()
    side = compare.our_side(cases.Point("x", kind, workload), steps, 1, tmp_path)
    compare.check(side, kind, steps)
    side.run([0, 1])


@pytest.mark.sampled(
    "numpy_argsort_reduceat-coalesce",
    "numpy_reduceat_fancy-adagrad",
    "numpy_reduceat_fancy-ftrl",
    "jax_np_dedup-adagrad",
)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.name}-{way.kind}")
def test_the_first_step_of_a_peer_is_right(workload, way):
    steps = workload.steps()
    compare.check(contestants.PerTable(way, workload, steps), way.kind, steps, way.corrects_bias)


@pytest.mark.parametrize("kind", ["coalesce", *contestants.UPDATES])
def test_one_wrong_row_is_detected(workload, kind):
    steps = workload.steps()
    way = next(w for w in WAYS if w.kind == kind)

    class OneRowOff(contestants.PerTable):
        def read_rows(self, table, ids):
            rows = super().read_rows(table, ids)
            rows[len(rows) // 2] += 0.01
            return rows

    with pytest.raises(compare.WrongError, match="sampled rows differ") as raised:
        compare.check(OneRowOff(way, workload, steps), kind, steps)
    assert "table a" in str(raised.value)


def test_a_missing_or_repeated_id_is_detected():
    ids, sums = np.array([5, 3]), np.ones((2, 2), np.float32)
    assert np.isnan(contestants.look_up(ids, sums, np.array([3, 4]))).tolist() == [[False] * 2, [True] * 2]
    assert np.isnan(contestants.look_up(np.array([3, 3]), sums, np.array([3]))).all()


def test_the_reference_sums_in_float64():
    ids, grads = np.array([1, 2, 1, 9]), np.float32([[1], [2], [3], [4]])
    sums = check.float64_sums(ids, grads, np.array([1, 9]))
    assert (sums.dtype, sums.tolist()) == (np.float64, [[4.0], [4.0]])


def test_a_peer_that_is_wrong_or_fails_is_reported_and_not_timed(workload, tmp_path):
    def fails(state, ids, grads):
        raise RuntimeError("no such kernel\nand more")

    def nothing(state, ids, grads):
        return ids[:0], grads[:0]

    ways = [contestants.Way("bad", "x", "coalesce", fails), contestants.Way("none", "x", "coalesce", nothing), WAYS[0]]
    settings = compare.Settings(1, 2, ways, lambda event, **values: None)
    run = compare.measure(cases.Point("w1/coalesce", "coalesce", workload), workload.steps(), None, settings)
    assert set(run["sides"]) == {"penstock", "numpy_argsort_reduceat"}
    assert run["failed"]["bad"] == "RuntimeError: no such kernel"
    assert run["failed"]["none"].startswith("wrong result: table a")
    assert len(run["sides"]["penstock"]["samples_ms"]) == 2


def test_a_way_that_takes_ids_only_gets_no_ratio(workload):
    keeps = contestants.Way("keeps", "x", "coalesce", lambda _, ids, grads: ids, ids_kept=len)
    loses = contestants.Way("loses", "x", "coalesce", lambda _, ids, grads: ids[1:], ids_kept=len)
    settings = compare.Settings(1, 2, [keeps, loses], lambda event, **values: None)
    run = compare.measure(cases.Point("w1/coalesce", "coalesce", workload), workload.steps(), None, settings)
    assert run["sides"]["keeps"]["ids_only"]
    assert "ratio" not in run["sides"]["keeps"]
    assert run["failed"] == {"loses": "wrong result: 2 of 1000 ids are not in its result"}


def test_peers_that_do_not_fit_into_memory_together_come_in_waves(workload, monkeypatch):
    ways = [contestants.Way(str(n), "x", "sgd", None) for n in range(5)]
    size = ways[0].num_bytes(workload)
    monkeypatch.setattr(machine, "free_bytes", lambda: 2.6 * size)
    assert [[w.name for w in wave] for wave in compare.waves(ways, workload.steps())] == [["0", "1"], ["2", "3"], ["4"]]
    monkeypatch.setattr(machine, "free_bytes", lambda: 0)
    assert [len(wave) for wave in compare.waves(ways, workload.steps())] == [1] * 5


def test_a_failure_of_ours_is_a_result(workload, monkeypatch):
    monkeypatch.setattr(
        penstock_adapter.Update, "read_rows", lambda self, table, ids: np.zeros((len(ids), 8), np.float32)
    )
    settings = compare.Settings(1, 2, [], lambda event, **values: None)
    run = compare.measure(cases.Point("w1/sgd", "sgd", workload), workload.steps(), None, settings)
    assert run["sides"] == {}
    assert "wrong result" in run["failed"]["penstock"]
    assert runner.Results(runs=[run]).failed == ["w1/sgd"]


# ---- samples and limits


def test_a_slow_side_is_skipped_and_the_best_peer_never_is():
    def sampled(**ms):
        return {name: [interleave.Sample(x, False)] * 3 for name, x in ms.items()}

    assert interleave.in_the_race(sampled(ours=10, best=60, second=170, last=181)) == ["ours", "best", "second"]
    assert interleave.in_the_race(sampled(ours=10, best=600)) == ["ours", "best"]
    assert interleave.in_the_race(sampled(ours=10)) == ["ours"]


def test_disturbed_samples_do_not_count_where_enough_others_remain():
    clean = [interleave.Sample(ms, False) for ms in (3.0, 1.0, 2.0)]
    loud = interleave.Sample(100.0, True)
    assert interleave.Timing((*clean, loud)).as_json()["max_ms"] == 3.0
    assert interleave.Timing((*clean[:2], loud)).as_json() == {
        "median_ms": 3.0,
        "min_ms": 1.0,
        "max_ms": 100.0,
        "clean": 2,
        "samples_ms": [3.0, 1.0, 100.0],
    }


def test_the_memory_traffic_kernels_read_and_write_whole_arrays():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**63, 1001, dtype=np.uint64) * np.uint64(2)
    assert memory_bandwidth.read_stream(words) == sum(words.tolist()) % 2**64
    memory_bandwidth.write_stream(words, 1)
    assert (words == 0x0101010101010101).all()
    for width in (1, 3, 16, 40):
        table, rows = np.zeros(50 * width, np.float32), rng.integers(0, 50, 200)
        memory_bandwidth.update_rows(table, rows, width)
        assert np.array_equal(table.reshape(50, width), np.bincount(rows, minlength=50)[:, None] * np.ones(width))
    with pytest.raises(IndexError, match="outside the table of 3 rows"):
        memory_bandwidth.update_rows(np.zeros(9, np.float32), np.array([3]), 3)
    with pytest.raises(ValueError, match="at least 1"):
        memory_bandwidth.update_rows(np.zeros(9, np.float32), np.array([0]), 0)


def test_the_limit_counts_every_gradient_once_and_every_row_touched(workload):
    step = workload.steps()[0]
    a, b = (step.num_unique[name] for name in ("a", "b"))
    update_s = {32: 1e-6, 64: 1.5e-6, 96: 9e-6, 12: 1e-6, 24: 3e-6, 36: 1e-6, 4: 0.05e-6, 16: 1.1e-6}
    rates = roofline.Rates(read=1e9, write=2e9, update_s=update_s)
    read = (700 * (8 + 32) + 300 * (8 + 12)) / 1e9
    assert roofline.limit_ms("coalesce", step, rates) == pytest.approx(1e3 * (read + (a * 40 + b * 20) / 2e9))
    assert roofline.limit_ms("sgd", step, rates) == pytest.approx(1e3 * (read + (a + b) * 1e-6))
    # Slots next to the weights or apart, whichever is faster.
    assert roofline.limit_ms("adagrad", step, rates) == pytest.approx(1e3 * (read + a * 1.5e-6 + b * 2e-6))
    assert roofline.limit_ms("replay", step, rates) == roofline.limit_ms("adagrad", step, rates)
    assert roofline.limit_ms("adam", step, rates) == pytest.approx(1e3 * (read + a * 3e-6 + b * 1e-6))
    assert roofline.limit_ms("rowwise_adagrad", step, rates) == pytest.approx(1e3 * (read + a * 1e-6 + b * 1.05e-6))


# ---- over the network


def test_doput_is_compared_with_a_replay_and_a_bare_doput_which_are_no_peers(workload):
    settings = compare.Settings(1, 2, [], lambda event, **values: None)
    run = compare.measure(cases.Point("w1/doput", "doput", workload), workload.steps(), None, settings)
    assert not run["failed"]
    assert set(run["sides"]) == {"penstock", "penstock_replay", "bare_flight"}
    assert re.search(r"\d% of replay's rows/s, \d+% of a bare DoPut's$", cell_of(run))
    assert not peers_of(run)


def test_a_service_that_does_not_start_is_a_result_and_not_a_hang(workload, monkeypatch):
    monkeypatch.setattr(doput, "SERVE", [sys.executable, "-c", "import sys; sys.exit('no port')"])
    settings = compare.Settings(1, 2, [], lambda event, **values: None)
    run = compare.measure(cases.Point("w1/doput", "doput", workload), workload.steps(), None, settings)
    assert run["failed"]["penstock"] == "RuntimeError: serve: no port"
