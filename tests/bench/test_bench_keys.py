"""``penstock bench``: dynamic tables and keys alone. No timing is asserted."""

import numpy as np
import pytest

from penstock.bench import cases, compare, contestants, dynamic_tables
from penstock.bench.distributions import hashed, uniform
from penstock.bench.report.summary_table import cell_of, peers_of
from penstock.bench.workloads import TableSize, Workload

SIZES = cases.Sizes(rows=3000, scale=0.005, short=True)


def point_of(case, sizes=SIZES):
    (point,) = cases.points(case, sizes, 1)
    return point, point.workload.steps()


def measured(case, ways=(), rounds=2, sizes=SIZES):
    settings = compare.Settings(1, rounds, list(ways), lambda event, **values: None)
    point, steps = point_of(case, sizes)
    return compare.measure(point, steps, None, settings)


def test_hashed_ids_are_distinct_keys_of_both_signs():
    keys = hashed(np.arange(100_000))
    assert len(np.unique(keys)) == 100_000
    assert 0.49 < (keys < 0).mean() < 0.51
    assert keys.dtype == np.int64


def test_a_dynamic_table_is_compared_with_a_static_one():
    workload = Workload("w1", "made up", (TableSize("table", 900, 8, 700, uniform),), num_steps=2)
    settings = compare.Settings(1, 2, [], lambda event, **values: None)
    run = compare.measure(cases.Point("w1/dynamic", "dynamic", workload), workload.steps(), None, settings)
    assert run["failed"] == {}
    assert set(run["sides"]) == {"penstock", "penstock_static"}
    assert cell_of(run).endswith("× the static table")
    assert not peers_of(run)


@pytest.mark.parametrize(
    ("case", "sides"),
    [
        ("keys/lookup", {"penstock", "random_lines", "dict"}),
        ("keys/insert", {"penstock", "dict"}),
        ("keys/stream", {"penstock", "dict"}),
        ("keys/admit", {"penstock"}),
        ("keys/evict", {"penstock", "penstock_without"}),
    ],
)
def test_cases_of_keys_measure_their_sides(case, sides):
    run = measured(case, [in_a_dict(len)])
    assert run["failed"] == {}
    assert set(run["sides"]) == sides


def test_a_failure_of_penstock_is_reported(monkeypatch):
    def fail(*_):
        raise ValueError("no table")

    monkeypatch.setattr(dynamic_tables, "Admissions", fail)
    run = measured("keys/admit", [])
    assert run["failed"] == {"penstock": "ValueError: no table"}
    assert run["sides"] == {}


def in_a_dict(new_number):
    """A way to number keys. new_number : the keys so far → the number of a new key"""

    def number(table, keys):
        return np.array([table.setdefault(key, new_number(table)) for key in keys.tolist()])

    return contestants.KeyWay("dict", "x", lambda capacity: {}, number)


@pytest.mark.parametrize(
    ("new_number", "wrong"), [(lambda table: len(table) // 2, 1500), (lambda table: len(table) - 1, 1)]
)
def test_keys_that_share_a_number_or_have_none_are_reported(new_number, wrong):
    run = measured("keys/insert", [in_a_dict(new_number)])
    assert run["failed"] == {"dict": f"wrong result: {wrong} keys have a wrong number or row"}


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_libraries_number_keys(name):
    pytest.importorskip(name)
    from penstock.bench import peers

    ways = [way for way in peers.ways(name, 1) if isinstance(way, contestants.KeyWay)]
    for case in ("keys/lookup", "keys/insert", "keys/stream"):
        run = measured(case, ways)
        assert run["failed"] == {}
        assert {way.name for way in ways} < set(run["sides"])
