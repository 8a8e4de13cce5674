"""Plans of cached tables: the counts of the replay and of the rule, to the last row."""

import itertools

import numpy as np
import pytest
from batches import batch
from cache_logs import words, zipf
from cache_rule import simulated
from ipc import log

import penstock as ps
from penstock.api.planning.choices import Choice
from penstock.api.planning.forecast import Forecast, Openings

ROW = 16  # bytes of a row of dim 2 with one slot
DEVICE_BYTES, LOOK_AHEAD = (ROW, 40 * ROW, 111 * ROW, 900 * ROW), (0, 1, 4, 16)
COUNTS = ("hits", "up", "down", "bytes")


def config_of(device_bytes=40 * ROW, look_ahead=4, accumulate=True, dynamic=None, rows=300):
    placement = ps.Placement("cached", device_bytes=device_bytes, look_ahead=look_ahead)
    optimizer = ps.Adagrad(0.1, use_gradient_accumulation=accumulate)
    tables = [
        ps.TableConfig(rows, 2, name="item", placement=placement, dynamic=dynamic),
        ps.TableConfig(50, 2, name="user"),
    ]
    return ps.EmbeddingConfig.from_tables(tables, optimizer)


def steps(num_steps=40, num_ids=300, rows=60):
    """Distinct ids per step, some of which are popular; every seventh step contains none."""
    rng = np.random.default_rng(1)
    shares = np.arange(1, num_ids + 1) ** -1.1
    for step in range(num_steps):
        yield rng.choice(num_ids, rows, p=shares / shares.sum()) * 7 % num_ids if step % 7 else np.zeros(0, np.int64)


def batches():
    for step, ids in enumerate(steps()):
        yield batch([step % 50], step=step, table="user")
        if len(ids):
            yield batch(ids, step=step, table="item")


@pytest.fixture
def plan_and_replay(tmp_path, call):
    """plan_and_replay(config, flags…) → what each of the combinations moves: by the plan, and by its replay."""

    def run(of_config, *flags, source=batches, device_bytes=DEVICE_BYTES, look_ahead=LOOK_AHEAD):
        (tmp_path / "log.arrows").write_bytes(log(list(source())))
        config, source = tmp_path / "tables.pbtxt", tmp_path / "log.arrows"
        of_config().save(config)
        several = ["--device-bytes", ",".join(map(str, device_bytes)), "--look-ahead", ",".join(map(str, look_ahead))]
        planned = call(0, "plan", config, source, *several, *flags)[1]
        actual, replayed = [choice["cached"]["item"] for choice in planned["choices"]], []
        for num_bytes, openings in itertools.product(device_bytes, look_ahead):
            of_config(num_bytes, openings).save(config)
            table = call(0, "replay", config, source, *flags)[1]["tables"]["item"]
            replayed.append({**table["cache"], "device_bytes": num_bytes, "look_ahead": openings})
        compared = (*COUNTS, "places", "device_bytes", "look_ahead")
        return [[{name: item[name] for name in compared} for item in each] for each in (actual, replayed)]

    return run


@pytest.mark.sampled("flags1")
@pytest.mark.parametrize("flags", [(), ("--num-required", "3", "--flush"), ("--num-required", "2", "--limit", "33")])
def test_a_plan_foretells_what_the_replay_moves(plan_and_replay, flags):
    planned, replayed = plan_and_replay(config_of, *flags)
    assert planned == replayed
    required = int(flags[1]) if flags else 1
    frames = [np.unique(ids) for ids in steps()][: 33 if "--limit" in flags else None]
    openings = [frames[first : first + required] for first in range(0, len(frames), required)]
    openings = [
        np.unique(np.concatenate(opening)) for opening in openings if len(opening) == required or "--flush" in flags
    ]
    for item in replayed:
        moves = simulated([[ids] for ids in openings], item["places"], item["look_ahead"])
        up, down = (sum(len(move[way]) for move in moves) for way in (0, 1))
        assert (item["up"], item["down"], item["hits"]) == (up, down, sum(hits for *_, hits in moves))
        assert item["bytes"] == (up + down) * ROW
    assert len({entry["up"] for entry in replayed}) > 6


@pytest.mark.parametrize("kind", ["zipf", "drift", "words"])
def test_a_replay_moves_what_the_rule_says(plan_and_replay, shared, kind):
    actual = words(shared) if kind == "words" else list(zipf(drift=7 * (kind == "drift")))
    planned, replayed = plan_and_replay(
        lambda *arguments: config_of(*arguments, rows=4000),
        source=lambda: [batch(ids, step=step, table="item") for step, ids in enumerate(actual)],
        device_bytes=[400 * ROW, 900 * ROW],
        look_ahead=[0, 4],
    )
    assert planned == replayed
    for item in replayed:
        moves = simulated([[ids] for ids in actual], item["places"], item["look_ahead"])
        assert (item["up"], item["down"]) == tuple(sum(len(move[way]) for move in moves) for way in (0, 1))


def test_frames_that_are_applied_one_by_one_move_as_the_rule_says(plan_and_replay):
    planned, replayed = plan_and_replay(
        lambda *arguments: config_of(*arguments, accumulate=False), "--num-required", "4"
    )
    assert planned == replayed
    frames = [np.unique(ids) for ids in steps()]
    openings = [[ids for ids in frames[first : first + 4] if len(ids)] for first in range(0, len(frames), 4)]
    for item in replayed:
        moves = simulated(openings, item["places"], item["look_ahead"])
        assert item["up"] == sum(len(up) for up, _, _ in moves)


@pytest.mark.sampled("True")
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_plan_foretells_the_moves_of_keys_that_come_and_go(plan_and_replay, accumulate):
    dynamic = ps.Dynamic(min_count=2, expire_after=6, evict="lru")
    planned, replayed = plan_and_replay(
        lambda *arguments: config_of(*arguments, accumulate=accumulate, dynamic=dynamic), "--num-required", "2"
    )
    assert planned == replayed
    assert len({item["up"] for item in replayed}) > 6


def test_a_plan_prints_a_line_for_each_cache(tmp_path, call):
    config_of().save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(list(batches())))
    command = ("plan", tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--look-ahead", "0,4")
    lines = [line.split() for line in call(0, *command)[0].splitlines()]
    assert lines[2:] == [
        ["cached", "rows", "device", "places", "ahead", "hits", "up", "missed", "down", "moved"],
        ["item", "300", "640", "bytes", "40", "0", "440", "669", "60.3%", "629", "20.8", "kB"],
        ["item", "300", "640", "bytes", "40", "4", "549", "560", "50.5%", "520", "17.3", "kB"],
    ]


def test_choices_without_a_table_that_they_are_about_are_refused(tmp_path, refused):
    (tmp_path / "log.arrows").write_bytes(log(list(batches())))
    config_of().save(tmp_path / "cached.pbtxt")
    plain = ps.EmbeddingConfig.from_tables([ps.TableConfig(5, 2, name="user", dynamic=ps.Dynamic())], ps.SGD(0.1))
    plain.save(tmp_path / "dynamic.pbtxt")
    message = refused(4, "plan", tmp_path / "cached.pbtxt", tmp_path / "log.arrows", "--capacity", "10")
    assert "no table of the configuration is dynamic: remove capacity, min-count and expire" in message
    message = refused(4, "plan", tmp_path / "dynamic.pbtxt", tmp_path / "log.arrows", "--device-bytes", "10")
    assert "no table of the configuration has the placement CACHED: remove device-bytes and look-ahead" in message
    for number, problem in (("0", "at least 1, got 0"), (str(2**63), "at most 9223372036854775807, got")):
        message = refused(2, "plan", tmp_path / "cached.pbtxt", tmp_path / "log.arrows", "--device-bytes", number)
        assert f"argument --device-bytes: expected {problem}" in message


def test_the_keys_of_a_cached_table_are_validated(tmp_path, call):
    config_of(dynamic=ps.Dynamic()).save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(list(batches())))
    call(0, "validate", tmp_path / "tables.pbtxt", tmp_path / "log.arrows")


@pytest.mark.parametrize("look_ahead", [4, 1000])
def test_a_plan_looks_at_every_opening_a_fixed_number_of_times(look_ahead):
    class Counted(dict):
        num_asked = 0

        def get(self, *arguments):
            Counted.num_asked += 1
            return super().get(*arguments)

    openings = [Openings({}, step, None, Counted(item=[np.array([step % 300])])) for step in range(500)]
    specs = {spec.name: spec for spec in config_of(look_ahead=look_ahead).tables if spec.name == "item"}
    Forecast(Choice(), specs, {}, 0).follow(openings, to_the_end=True)
    assert Counted.num_asked == 2 * len(openings)
