"""Plans of dynamic tables: equal to the replay to the last digit, and estimates with their errors."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from dynamic import churning_steps, config_of, log_of, timed
from openings import hashed

import penstock as ps
from penstock.api.planning.choices import Choice, all_choices
from penstock.api.planning.forecast import shard_bits
from penstock.api.planning.planner import Planner, reading
from penstock.io.decoding.reader import FrameReader
from penstock.model.gate_policy import GatePolicy
from penstock.pyx.keys.directory import Directory

STEPS = churning_steps(160)
ONE = (Choice(),)


def planned(config, source, choices=ONE, *, num_required=None, threads=2, sample=None, **options):
    """Return the planner after the source. options : of reading and of ``Planner.run``"""
    of_run = {name: options.pop(name) for name in ("limit", "flush", "max_stale") if name in options}
    policy = GatePolicy.of(config.gate_policy, num_required)
    planner = Planner(config, choices, policy=policy, threads=threads, sample=sample)
    planner.run(FrameReader(source, reading(config, **options)), **of_run)
    return planner


def assert_equal(planner, engine, report, number=0):
    """The forecast of a choice is what the replay reported."""
    counters, forecast = planner.counters, planner.forecasts[number]
    assert (counters.rows, counters.frames, counters.stale, counters.steps, dict(counters.dropped)) == (
        (report.rows, report.frames, report.stale, report.steps, dict(report.dropped))
    )
    assert planner.gate.num_accumulated == report.pending
    actual = {name: table.report for name, table in forecast.tables().items()}
    assert actual == {name: table.keys for name, table in report.tables.items() if table.keys is not None}
    for name, directory in forecast.directories.items():
        state, expected = directory.get_state(), engine.core.tables.dynamic[name].directory.get_state()
        assert all(state[key].tolist() == expected[key].tolist() for key in expected if key != "row")


@pytest.mark.promise("A plan has the counts of the replay")
@pytest.mark.parametrize("num_required", [1, 3])
@pytest.mark.parametrize(
    "dynamic",
    [
        ps.Dynamic(evict="lru"),
        ps.Dynamic(min_count=3, expire_after=9, evict="lru"),
        ps.Dynamic(min_count=2, count="frames", forget_after=5, expire_after=4),
        ps.Dynamic(min_count=2, evict="lfu", half_life=4),
        ps.Dynamic(probability=0.4, on_full="reject"),
    ],
    ids=["lru", "filter, expiry and lru", "frames", "lfu", "chance and reject"],
)
def test_a_plan_equals_the_replay_to_the_last_digit(dynamic, num_required):
    config = config_of(dynamic, rows=64)
    engine = ps.Engine(config, num_required=num_required)
    report = engine.run([log_of(STEPS)], flush=True)
    planner = planned(config, [log_of(STEPS)], num_required=num_required, flush=True)
    assert_equal(planner, engine, report)
    assert report.tables["user"].keys.admitted > 20


def test_frames_that_are_not_accumulated_and_a_half_full_gate_are_as_in_a_replay():
    optimizer = ps.Adagrad(0.1, use_gradient_accumulation=False)
    config = config_of(ps.Dynamic(min_count=2, evict="lru"), rows=64, optimizer=optimizer)
    engine = ps.Engine(config, num_required=3)
    report = engine.run([log_of(STEPS)])
    assert report.pending
    assert_equal(planned(config, [log_of(STEPS)], num_required=3), engine, report)


@pytest.mark.parametrize("merge", [None, "step", "round"])
def test_workers_are_merged_and_stale_frames_dropped_as_in_a_replay(merge):
    config = config_of(ps.Dynamic(min_count=2, expire_after=7, evict="lru"), rows=44)
    sources = [log_of(churning_steps(40, seed=seed)) for seed in range(3)]
    engine = ps.Engine(config, num_required=2)
    report = engine.run([[source] for source in sources], merge=merge)
    assert report.stale
    assert_equal(planned(config, [[source] for source in sources], num_required=2, merge=merge), engine, report)


def two_tables(steps, items=40):
    """Rows of a dynamic and of a static table, of which some are bad."""
    user, rng = log_of(steps), np.random.default_rng(5)
    is_item = rng.random(user.num_rows) < 0.3
    ids = np.where(is_item, rng.integers(0, items, user.num_rows), user["id"].to_numpy())
    names = pa.array(np.where(is_item, "item", "user"))
    return pa.record_batch({"id": ids, "gradient": user["gradient"], "step": user["step"], "table": names})


def config_of_two(dynamic):
    tables = [
        ps.TableConfig(24, 4, name="user", dynamic=dynamic),
        ps.TableConfig(30, 4, name="item"),
        ps.TableConfig(9, 4, name="other", dynamic=ps.Dynamic(evict="lru")),
    ]
    return ps.EmbeddingConfig.from_tables(tables, ps.SGD(0.1))


def test_several_tables_and_dropped_rows_are_as_in_a_replay():
    config = config_of_two(ps.Dynamic(min_count=2, evict="lru"))
    engine = ps.Engine(config)
    report = engine.run([two_tables(STEPS)], on_bad_row="drop", limit=120)
    assert report.dropped["id_out_of_range"] > 20
    planner = planned(config, [two_tables(STEPS)], on_bad_row="drop", limit=120)
    assert_equal(planner, engine, report)
    assert planner.forecasts[0].tables()["other"].report.admitted == 0


def test_a_bad_id_stops_a_plan_where_it_stops_a_replay():
    config = config_of_two(ps.Dynamic())
    with pytest.raises(ps.InputError, match=r"column 'id': expected 0 <= id < 30 .vocabulary_size of table 'item'."):
        planned(config, [two_tables(STEPS)])


def test_a_clock_of_time_is_that_of_the_stream():
    dynamic = ps.Dynamic(expire_after=50, clock="time")
    batch = log_of(STEPS)
    batch = batch.append_column("time", pa.array(batch["step"].to_numpy() * 20 + 1000))
    config = config_of(dynamic, rows=64)
    engine = ps.Engine(config)
    report = engine.run([batch])
    assert report.tables["user"].keys.expired
    assert_equal(planned(config, [batch]), engine, report)


def test_a_choice_without_expiry_needs_no_clock():
    table = config_of(ps.Dynamic(expire_after=9, clock="time"), rows=64)
    log, choices = timed([1, 2, 1, 3], [0, 5, 50, 90]), all_choices((), {"expire_after": [None, 9]}, {})
    planner = planned(table, [log], choices)
    never = ps.Engine(config_of(ps.Dynamic(), rows=64))
    assert planner.forecasts[0].tables()["user"].report == never.run([log]).tables["user"].keys
    assert planner.forecasts[1].tables()["user"].report.returned == 1


def test_every_choice_is_the_plan_of_it_alone_for_any_number_of_threads():
    choices = all_choices([24, 100], {"min_count": [1, 2], "expire_after": [None, 6]}, {})
    assert len(choices) == 8
    config = config_of(ps.Dynamic(evict="lru"), rows=32)
    together = planned(config, [log_of(STEPS)], choices, threads=3)
    for choice, forecast in zip(choices, together.forecasts, strict=True):
        settings = dataclasses.replace(ps.Dynamic(evict="lru"), **choice.settings)
        engine = ps.Engine(config_of(settings, rows=choice.capacity))
        report = engine.run([log_of(STEPS)])
        assert forecast.tables()["user"].report == report.tables["user"].keys
        assert forecast.tables()["user"].device_bytes == choice.capacity * 4 * 4 * 2
    assert len({str(forecast.tables()["user"].report) for forecast in together.forecasts}) >= 6


def test_a_choice_that_fills_a_table_ends_at_the_step_at_which_the_replay_fails():
    config = config_of(ps.Dynamic(), rows=60)
    engine = ps.Engine(config)
    with pytest.raises(ps.CapacityError) as error:
        engine.run([log_of(STEPS)])
    planner = planned(config, [log_of(STEPS)], all_choices([60, 1000], {}, {}))
    full, roomy = planner.forecasts
    assert (full.full.step, full.full.table, full.full.problem) == (engine.global_step, "user", str(error.value))
    assert full.tables()["user"].report == engine.core.table_reports()["user"].keys
    assert roomy.full is None
    assert planner.counters.steps == 160


def test_a_table_that_is_full_stops_the_others_of_its_choice():
    tables = [ps.TableConfig(rows, 4, name=name, dynamic=ps.Dynamic()) for name, rows in (("user", 500), ("item", 20))]
    config = ps.EmbeddingConfig.from_tables(tables, ps.SGD(0.1))
    engine = ps.Engine(config)
    with pytest.raises(ps.CapacityError):
        engine.run([two_tables(STEPS, items=40)])
    planner = planned(config, [two_tables(STEPS, items=40)])
    assert planner.is_over
    assert planner.forecasts[0].full.table == "item"
    assert {name: table.report for name, table in planner.forecasts[0].tables().items()} == {
        name: table.keys for name, table in engine.core.table_reports().items()
    }


def test_an_example_stream_is_planned_by_its_ids():
    user = ps.TableConfig(16, 4, name="user", combiner="mean", dynamic=ps.Dynamic(min_count=2, evict="lru"))
    clicks = ps.FeatureConfig(user, name="clicks", max_sequence_length=2, output_shape=None)
    config = ps.EmbeddingConfig.from_features([ps.FeatureConfig(user, name="seen"), clicks], 4, ps.SGD(0.1))
    rng = np.random.default_rng(0)
    columns = {}
    for feature, width in (("seen", 4), ("clicks", 8)):
        kind = pa.struct([("ids", pa.list_(pa.int64())), ("gradient", pa.list_(pa.float32(), width))])
        ids = [rng.integers(-30, 30, rng.integers(0, 4)).tolist() for _ in range(60)]
        columns[feature] = pa.array([{"ids": row_id, "gradient": [1.0] * width} for row_id in ids], kind)
    batch = pa.record_batch({**columns, "step": pa.array(np.arange(60) // 4)})
    engine = ps.Engine(config)
    report = engine.run([batch])
    assert_equal(planned(config, [batch]), engine, report)


def test_a_sample_estimates_every_count_within_its_errors():
    rng = np.random.default_rng(0)
    steps = [hashed(np.unique(rng.zipf(1.2, 20_000) % 300_000 + 2000 * step)) for step in range(30)]
    config = config_of(ps.Dynamic(min_count=2, expire_after=12, evict="lru"), rows=1 << 18)
    choices = all_choices([1 << 18, 1 << 19], {"min_count": [1, 2]}, {})
    exact = planned(config, [log_of(steps)], choices, sample=1)
    rough = planned(config, [log_of(steps)], choices, sample=0.25)
    for forecast, other in zip(exact.forecasts, rough.forecasts, strict=True):
        true, estimate = forecast.tables()["user"], other.tables()["user"]
        assert (true.share, estimate.share, true.standard_error) == (1, 0.25, {})
        for name, error in estimate.standard_error.items():
            assert abs(getattr(true.report, name) - getattr(estimate.report, name)) <= 5 * error + 1, name
        assert 0 < estimate.standard_error["admitted"] < 0.02 * true.report.admitted


def test_choices_of_many_rows_are_a_sample_unless_all_keys_are_requested(monkeypatch):
    monkeypatch.setattr("penstock.api.planning.planner.EXACT_ROWS", 1 << 18)
    config = config_of(ps.Dynamic(evict="lru"), rows=1 << 19)
    shares = [
        [forecast.tables()["user"].share for forecast in Planner(config, choices, sample=sample).forecasts]
        for choices, sample in [(ONE, None), (all_choices([1 << 18, 1 << 19], {}, {}), None), (ONE, 1), (ONE, 0.3)]
    ]
    assert shares == [[0.5], [0.25, 0.25], [1.0], [0.25]]


def test_small_tables_are_followed_whole_in_a_sample():
    config = config_of(ps.Dynamic(evict="lru"), rows=32)
    (first,) = planned(config, [log_of(STEPS)], sample=0.01).forecasts
    (other,) = planned(config, [log_of(STEPS)]).forecasts
    assert first.tables() == other.tables()


def test_virtual_shards_are_counted_as_a_directory_does():
    for capacity in (1, 4096, 8191, 8192, 100_000, 4 << 20, 5 << 20):
        assert Directory(capacity, 0, "t").num_shards == 1 << shard_bits(capacity)


def test_too_many_stale_rows_are_an_error():
    sources = [[log_of(STEPS)], [log_of(STEPS)]]
    with pytest.raises(ps.InputError, match=r"are of stale frames .50.0%., more than --max-stale 0.1"):
        planned(config_of(ps.Dynamic(evict="lru")), sources, max_stale=0.1)


def test_a_configuration_without_a_dynamic_table_has_nothing_to_plan():
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 4)], ps.SGD(0.1))
    with pytest.raises(ps.ConfigError, match="no table of the configuration is dynamic"):
        Planner(config, [Choice()])


def test_choices_that_contradict_the_configuration_are_named():
    config = config_of(ps.Dynamic(probability=0.5))
    with pytest.raises(ps.UsageError, match="table 'user': probability and min_count exclude each other"):
        Planner(config, all_choices([], {"min_count": [2]}, {}))


def test_a_choice_that_admits_every_key_drops_what_only_counting_needs():
    config = config_of(ps.Dynamic(min_count=2, count="frames", forget_after=5, expire_after=4), rows=64)
    planner = planned(config, [log_of(STEPS)], all_choices([], {"min_count": [1]}, {}))
    engine = ps.Engine(config_of(ps.Dynamic(expire_after=4), rows=64))
    report = engine.run([log_of(STEPS)])
    assert planner.forecasts[0].tables()["user"].report == report.tables["user"].keys
