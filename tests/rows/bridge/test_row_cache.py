"""Which rows of a cached table go up and down, against the rule in plain Python (cache_rule.py)."""

import numpy as np
import pytest
from cache_logs import words, zipf
from cache_rule import fewest_misses, simulated

from penstock.rows.bridge.row_cache import RowCache

ALL = 10**6


@pytest.fixture
def log(request, shared):
    return {"zipf": zipf, "drift": lambda: zipf(drift=7), "words": lambda: words(shared)}[request.param]()


def moved(openings, num_rows, places, look_ahead, **options):
    """What a RowCache moves, in the form of ``simulated``; it foresees so many openings."""
    cache, moves, resident = RowCache(num_rows, places, **options), [], {}
    for number, several in enumerate(openings):
        first = number + look_ahead if number else 0
        for upcoming in openings[first : number + look_ahead + 1] if look_ahead else []:
            for rows in upcoming:
                cache.foresee(rows)
        for rows in several:
            used = []
            for chunk in cache.use(rows):
                chunk_rows = rows[chunk.positions]
                assert [resident.pop(row) for row in chunk.down_rows.tolist()] == chunk.down_places.tolist()
                assert not resident.keys() & set(chunk_rows[chunk.up].tolist())
                resident.update(zip(chunk_rows[chunk.up].tolist(), chunk.places[chunk.up].tolist(), strict=True))
                assert [resident[row] for row in chunk_rows.tolist()] == chunk.places.tolist()
                assert len(set(resident.values())) == len(resident) <= places
                used += chunk_rows.tolist()
                ups, downs = sorted(chunk_rows[chunk.up].tolist()), sorted(chunk.down_rows.tolist())
                moves.append((ups, downs, len(chunk_rows) - len(ups)))
            assert sorted(used) == sorted(rows.tolist())
    there = np.full(num_rows, -1)
    there[list(resident)] = list(resident.values())
    assert (cache.places_of(np.arange(num_rows)) == there).all()
    return moves


@pytest.mark.parametrize("log", ["zipf", "drift", "words"], indirect=True)
@pytest.mark.parametrize("places", [40, 400, 900])
@pytest.mark.parametrize("look_ahead", [0, 1, 4, ALL])
def test_the_rows_that_move_are_those_of_the_rule(log, places, look_ahead):
    openings = [[rows] for rows in log]
    assert moved(openings, 5000, places, look_ahead) == simulated(openings, places, look_ahead)


@pytest.mark.parametrize("is_tolerant", [False, True])
def test_small_logs_of_any_kind_move_as_the_rule_says(is_tolerant):
    rng = np.random.default_rng(5)
    for _ in range(150):
        num_rows, look_ahead = int(rng.integers(3, 60)), int(rng.choice([0, 1, 2, 3, 5, 9, ALL]))
        places, shares = int(rng.integers(1, num_rows + 3)), np.arange(1, num_rows + 1) ** -rng.uniform(0, 2)
        openings = [
            [
                rng.permutation(np.unique(rng.choice(num_rows, rng.integers(0, num_rows), p=shares / shares.sum())))
                for _ in range(rng.integers(0, 3))
            ]
            for _ in range(rng.integers(2, 40))
        ]
        actual = moved(openings, num_rows, places, look_ahead, is_tolerant=is_tolerant)
        assert actual == simulated(openings, places, look_ahead)


@pytest.mark.parametrize("log", ["zipf", "drift", "words"], indirect=True)
@pytest.mark.parametrize("places", [350, 700])
def test_with_the_whole_log_foreseen_the_misses_are_within_one_percent_of_the_fewest_possible(log, places):
    uses = [rows.tolist() for rows in log]
    if places < max(map(len, uses)):
        places += max(map(len, uses))
    misses = sum(len(up) for up, _, _ in moved([[np.array(rows)] for rows in uses], 5000, places, ALL))
    assert misses <= 1.01 * fewest_misses(uses, places)
    assert misses < sum(len(up) for up, _, _ in moved([[np.array(rows)] for rows in uses], 5000, places, 0))


def test_another_use_than_the_foreseen_one_forgets_the_others():
    rows = [np.array([0, 1]), np.array([2, 3]), np.array([0, 4])]
    surprised, blind = RowCache(9, 4), RowCache(9, 4)
    for row in rows:
        surprised.foresee(row)
    for row in (rows[0], np.array([5, 6]), rows[1], rows[2]):
        ours, others = list(surprised.use(row)), list(blind.use(row))
        assert [m.down_rows.tolist() for m in ours] == [m.down_rows.tolist() for m in others]


def test_rows_foreseen_after_a_surprise_count_again():
    cache = RowCache(9, 4)
    cache.foresee(np.array([0, 1]))
    list(cache.use(np.array([2, 3])))  # foretold were 0 and 1
    list(cache.use(np.array([0, 1])))
    for upcoming in ([4], [2, 3]):
        cache.foresee(np.array(upcoming))
    (moves,) = cache.use(np.array([4]))
    assert moves.down_rows.tolist() in ([0], [1])  # not 2 or 3, which are older and needed


def test_a_tolerant_cache_takes_other_rows_than_foreseen_and_keeps_what_it_knows_of_the_next_uses():
    cache = RowCache(9, 4, is_tolerant=True)
    for upcoming in ([0, 1, 2, 3], [0, 8], [1, 2], [0]):
        cache.foresee(np.array(upcoming))
    list(cache.use(np.array([0, 1, 2, 3])))
    (moves,) = cache.use(np.array([3, 7]))  # 0 and 8 were foreseen; 1 and 2 follow, then 0
    assert moves.down_rows.tolist() == [0]
    (moves,) = cache.use(np.array([1, 2]))
    assert moves.up.tolist() == []
    (moves,) = cache.use(np.array([0, 1]))
    assert moves.down_rows.tolist() == [7]  # used last together with 3, whose mix is larger


def test_a_cache_that_foresees_in_vain_stays_small_and_right():
    log = list(zipf(num_steps=100))
    cache, blind = RowCache(4000, 900, is_tolerant=True), RowCache(4000, 900)
    for rows in log:
        cache.foresee(np.setdiff1d(np.arange(4000), rows))  # always wrong, and only of this use
        ours, others = [list(item.use(rows)) for item in (cache, blind)]
        assert sorted(ours[0].down_rows.tolist()) == sorted(others[0].down_rows.tolist())
