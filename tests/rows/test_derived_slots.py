"""Weights that come without the slot that determines them, as FTRL's: a gradient of 0 keeps them."""

import logging
from functools import partial

import engines
import numpy as np
import pyarrow as pa
import pytest
from cli import frame
from ipc import write

import penstock as ps
from penstock.model.updates import OPTIMIZERS

RATE = 0.1
DYNAMIC = ps.DynamicLearningRate(0)
RULES = {
    "ftrl": ps.FTRL(RATE),
    "ftrl_l2_beta": ps.FTRL(RATE, l2_regularization_strength=0.3, beta=0.5),
    "ftrl_l1": ps.FTRL(RATE, l1_regularization_strength=0.01),
    "ftrl_power": ps.FTRL(RATE, learning_rate_power=-0.7),
    "ftrl_power_0": ps.FTRL(RATE, learning_rate_power=0.0),
    "ftrl_times_lr": ps.FTRL(RATE, multiply_linear_by_learning_rate=True, l2_regularization_strength=0.2, beta=1.0),
    "yogi": ps.OnlineYogi(RATE),
    "yogi_l1_l2": ps.OnlineYogi(RATE, l1=0.01, l2=0.3),
}
ROWS = 64


def weights_of(rows=ROWS, dim=4):
    weights = np.random.default_rng(rows).standard_normal((rows, dim)).astype(np.float32)
    weights[:2] = [[5.0], [0.0]]
    return weights + np.float32(0.1) * np.sign(weights)  # far enough from 0 for float32 to hold l1 next to them


config_of = partial(engines.config_of, tables=("user",), dim=4, rows=ROWS)


def source_of(path, user, **slots):
    (path / "user").mkdir(parents=True)
    for name, array in {"user": user, **{f"user/{slot}": rows for slot, rows in slots.items()}}.items():
        np.save(path / f"{name}.npy", array)
    return path


def after_zeros(engine, ids=range(ROWS), dim=4, **more):
    engine.apply({"user": (ids, np.zeros((len(ids), dim), np.float32))}, **more)
    return engine.lookup("user", ids)


def assert_kept(weights, expected):
    ulps = np.abs(weights.astype(np.float64) - expected) / np.spacing(np.abs(expected))
    assert ulps.max() <= 2


# XLA's pow differs by more than 2 ulp.
@pytest.mark.parametrize(
    ("variant", "rule"), [(v, rule) for v in ("host", "xla") for rule in RULES if (v, rule) != ("xla", "ftrl_power")]
)
def test_a_gradient_of_0_keeps_weights_that_were_read_without_slots(tmp_path, variant, rule):
    engine = ps.Engine(config_of(RULES[rule]), variant=variant)
    loaded = engine.read_tables(source_of(tmp_path / "w", user=weights_of()))
    assert loaded.derived == {"user/linears": ROWS}
    assert "linears" not in loaded.initial["user"]
    assert_kept(after_zeros(engine), weights_of())


def test_the_first_gradient_moves_a_weight_by_a_step_from_its_value(tmp_path):
    engine = ps.Engine(config_of(ps.FTRL(RATE)))
    engine.read_tables(source_of(tmp_path / "w", user=np.full((ROWS, 4), 5.0)))
    np.testing.assert_allclose(engine.slots("user")["linears"], -15.811388, rtol=1e-7)
    engine.apply({"user": ([3], np.full((1, 4), 1e-6))})
    np.testing.assert_array_equal(engine.lookup("user", [3]), np.float32(4.9999995))


def test_the_slot_is_derived_with_the_accumulators_of_the_source(tmp_path):
    source = source_of(tmp_path / "w", weights_of(), accumulators=np.full((ROWS, 4), 7.0))
    engine = ps.Engine(config_of(ps.FTRL(RATE)))
    engine.read_tables(source)
    assert_kept(after_zeros(engine), weights_of())
    assert (engine.slots("user")["accumulators"] == 7).all()


def test_a_slot_that_is_given_stays_as_it_is(tmp_path):
    source = source_of(tmp_path / "w", weights_of(), linears=np.full((ROWS, 4), 2.0))
    engine = ps.Engine(config_of(ps.FTRL(RATE)))
    assert engine.read_tables(source).derived == {}
    assert (engine.slots("user")["linears"] == 2).all()
    engine.load_parameters("user", weights_of(), accumulators=np.ones((ROWS, 4)), linears=np.zeros((ROWS, 4)))
    assert (engine.slots("user")["linears"] == 0).all()


def test_weights_of_16_bits_are_kept_as_they_are_stored(tmp_path):
    message = config_of(ps.FTRL(RATE)).to_engine_proto()
    message.table.add(name="user", storage_dtype="BFLOAT16")
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(message))
    engine.read_tables(source_of(tmp_path / "w", user=weights_of()))
    before = engine.lookup("user", range(ROWS))
    np.testing.assert_array_equal(after_zeros(engine), before)


def test_keys_of_a_dynamic_table_keep_their_weights(tmp_path):
    keys = np.arange(ROWS) * 2**40 - 5
    source = source_of(tmp_path / "w", weights_of(), keys=keys)
    engine = ps.Engine(config_of(ps.FTRL(RATE), dynamic=ps.Dynamic()))
    assert engine.read_tables(source).derived == {"user/linears": ROWS}
    assert_kept(after_zeros(engine, keys), weights_of())


def test_shares_keep_their_weights(tmp_path):
    source = source_of(tmp_path / "w", user=weights_of())
    for rank in range(2):
        engine = ps.Engine(config_of(ps.FTRL(RATE)), share=(rank, 2))
        engine.read_tables(source)
        ids = np.arange(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        assert_kept(after_zeros(engine, ids), weights_of()[ids])


@pytest.mark.parametrize("dynamic", [None, ps.Dynamic()])
def test_new_slots_keep_the_weights_of_a_commit(tmp_path, dynamic):
    before = ps.Engine(config_of(ps.Adagrad(RATE), dynamic=dynamic))
    before.apply({"user": (range(ROWS), weights_of())})
    expected = before.lookup("user", range(ROWS))
    before.save(tmp_path)
    engine = ps.Engine.restore(tmp_path, config=config_of(ps.FTRL(RATE), dynamic=dynamic), reset_slots="user")
    assert_kept(after_zeros(engine), expected)


def test_new_slots_of_a_table_that_becomes_dynamic_keep_the_weights(tmp_path):
    before = ps.Engine(config_of(ps.Adagrad(RATE)))
    before.apply({"user": (range(ROWS), weights_of())})
    expected = before.lookup("user", range(2, ROWS))
    before.save(tmp_path)
    config = config_of(ps.FTRL(RATE), dynamic=ps.Dynamic())
    engine = ps.Engine.restore(tmp_path, config=config, reset_slots="user")
    assert_kept(after_zeros(engine, range(2, ROWS)), expected)


def test_a_schedule_a_given_rate_and_the_last_one_are_the_rate(tmp_path):
    source = source_of(tmp_path / "w", user=weights_of())
    engine = ps.Engine(config_of(ps.FTRL(lambda step: RATE)))
    engine.read_tables(source)
    assert_kept(after_zeros(engine), weights_of())
    engine = ps.Engine(config_of(ps.FTRL(DYNAMIC)))
    engine.read_tables(source, learning_rates=[0.25])
    assert_kept(after_zeros(engine, learning_rates=[0.25]), weights_of())
    before = ps.Engine(config_of(ps.Adagrad(DYNAMIC)))
    before.load_parameters("user", weights_of(), accumulators=np.ones((ROWS, 4)))
    before.apply({}, learning_rates=[0.5])
    before.save(tmp_path / "c")
    engine = ps.Engine.restore(tmp_path / "c", config=config_of(ps.FTRL(DYNAMIC)), reset_slots="user")
    assert_kept(after_zeros(engine, learning_rates=[0.5]), weights_of())


def test_a_rate_that_is_unknown_is_one_warning_unless_the_slot_does_not_need_it(tmp_path, caplog):
    source = source_of(tmp_path / "w", user=weights_of())
    engine = ps.Engine(config_of(ps.FTRL(DYNAMIC)))
    with caplog.at_level(logging.WARNING, "penstock"):
        loaded = engine.read_tables(source)
    (record,) = caplog.records
    assert "table 'user': its 'linears' depend on the learning rate of tag 0, which is unknown" in record.message
    assert "--learning-rate 0=VALUE" in record.message
    assert loaded.derived == {}
    assert loaded.initial == {"user": ("accumulators", "linears")}
    assert loaded.notes == (record.message,)
    caplog.clear()
    engine = ps.Engine(config_of(ps.FTRL(DYNAMIC, multiply_linear_by_learning_rate=True)))
    engine.read_tables(source)
    assert_kept(after_zeros(engine, learning_rates=[0.3]), weights_of())
    assert not caplog.records


def test_commands_show_the_warning_of_a_rate_that_is_unknown(tmp_path, call):
    config, log = tmp_path / "t.pbtxt", tmp_path / "log.arrows"
    config_of(ps.FTRL(DYNAMIC), dim=2).save(config)
    source = source_of(tmp_path / "w", user=weights_of(dim=2))
    note = "note      table 'user': its 'linears' depend on the learning rate of tag 0, which is unknown"
    assert note in call(0, "import", source, tmp_path / "c", "--config", config)[0]
    write(log, [frame(0, learning_rates=pa.array([[0.1]] * 4, pa.list_(pa.float32())))])
    assert note in call(0, "replay", config, log, "--init", source)[0]


def test_accumulators_of_0_without_beta_and_l2_are_one_warning(tmp_path, caplog):
    engine = ps.Engine(config_of(ps.OnlineYogi(RATE, initial_v_value=0.0)))
    with caplog.at_level(logging.WARNING, "penstock"):
        engine.read_tables(source_of(tmp_path / "w", user=weights_of()))
    (record,) = caplog.records
    assert f"nothing determines the 'linears' of {ROWS} rows, whose 'vs' are 0, without beta and l2" in record.message
    assert_kept(after_zeros(engine), weights_of())


@pytest.mark.parametrize("command", ["import", "init"])
def test_commands_keep_weights_and_take_the_rate(tmp_path, call, command):
    config, log, tables = tmp_path / "t.pbtxt", tmp_path / "log.arrows", tmp_path / "tables"
    ps.EmbeddingConfig.from_tables([ps.TableConfig(50, 2, name="user", optimizer=ps.FTRL(DYNAMIC))]).save(config)
    weights = weights_of(50, 2)
    source = source_of(tmp_path / "w", user=weights)
    words = "--learning-rate", "0=0.1"
    if command == "import":
        text, result = call(0, "import", source, tmp_path / "c", "--config", config, *words)
        assert "derived   user/linears: 50 rows, from the weights\n" in text
        assert result["derived"] == {"user/linears": 50}
    else:
        write(log, [frame(0, ids=[49])])
        call(0, "replay", config, log, "--init", source, "--out", tables, *words)
        engine = ps.Engine(ps.EmbeddingConfig.load(config))
        engine.read_tables(tables)
        engine.save(tmp_path / "c")
    engine = ps.Engine.restore(tmp_path / "c")
    assert_kept(after_zeros(engine, range(49), 2, learning_rates=[0.1]), weights[:49])


def test_the_rules_whose_weight_is_a_function_of_the_slots_say_so():
    assert [name for name, rule in OPTIMIZERS.items() if rule.derived_slot] == ["ftrl", "online_yogi"]
