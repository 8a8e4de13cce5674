"""Dynamic settings of a table: Python, text files, messages, and what contradicts itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_configs import engine, engine_text

import penstock as ps

NUMBERS = st.none() | st.integers(1, 2**31 - 1)


@st.composite
def dynamics(draw):
    settings = {
        "expire_after": draw(NUMBERS),
        "evict": draw(st.sampled_from([None, "lru", "lfu"])),
        "on_full": draw(st.sampled_from(["error", "reject"])),
        "missing": draw(st.sampled_from(["initial", "zero"])),
        "key_type": draw(st.sampled_from(["int64", "uint64"])),
    }
    if settings["evict"] == "lfu":
        settings["half_life"] = draw(st.integers(1, 2**31 - 1))
    if settings["expire_after"] is not None:
        settings["clock"] = draw(st.sampled_from(["steps", "time"]))
    if draw(st.booleans()):
        settings["probability"] = draw(st.floats(0, 1))
    elif draw(st.booleans()):
        settings["min_count"] = draw(st.integers(2, 2**31 - 1))
        settings["count"] = draw(st.sampled_from(["rows", "frames"]))
        settings["forget_after"] = draw(NUMBERS)
    return ps.Dynamic(**settings)


def table_of(dynamic, **more):
    return ps.TableConfig(100, 4, name="user", optimizer=ps.Adagrad(0.1), dynamic=dynamic, **more)


@given(dynamics())
def test_settings_survive_messages(dynamic):
    config = ps.EmbeddingConfig.from_tables([table_of(dynamic)])
    again = ps.EmbeddingConfig.from_proto(config.to_engine_proto())
    assert config.table("user").dynamic == again.table("user").dynamic == dynamic


@pytest.mark.parametrize("name", ["c.pbtxt", "c.pb"])
def test_settings_survive_files(tmp_path, name):
    dynamic = ps.Dynamic(min_count=3, forget_after=9, expire_after=500_000, evict="lru", on_full="reject")
    ps.EmbeddingConfig.from_tables([table_of(dynamic)]).save(tmp_path / name)
    assert ps.EmbeddingConfig.load(tmp_path / name).table("user").dynamic == dynamic


def test_settings_in_text():
    config = engine(
        'table { name: "a" dynamic { key_type: UINT64 admit { min_count: 3 count: FRAMES forget_after: 20 } '
        "expire { after: 50 clock: TIME } evict { by: LFU half_life: 7 } on_full: REJECT missing: ZERO } }"
    )
    assert config.table("a").dynamic == ps.Dynamic(
        3, "frames", 20, None, 50, "time", "lfu", 7, "reject", "zero", "uint64"
    )
    assert engine('table { name: "a" dynamic { evict { } } }').table("a").dynamic == ps.Dynamic(evict="lru")
    assert engine('table { name: "a" dynamic { } }').table("a").dynamic == ps.Dynamic()
    assert engine("").table("a").dynamic is None


def test_tensorflows_message_cannot_hold_a_dynamic_table():
    config = ps.EmbeddingConfig.from_tables([table_of(ps.Dynamic())])
    with pytest.raises(ps.ConfigError, match="use to_engine_proto"):
        config.to_proto()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_count": 0}, "min_count must be an int from 1 to 2147483647, got 0"),
        ({"expire_after": 2**31}, "expire_after must be an int from 1 to 2147483647, got 2147483648"),
        ({"expire_after": 1.5}, "expire_after must be an int from 1 to 2147483647, got 1.5"),
        ({"count": "row"}, "count must be one of rows, frames, got 'row'"),
        ({"evict": "fifo"}, "evict must be one of lru, lfu, got 'fifo'"),
        ({"clock": None}, "clock must be one of steps, time, got None"),
        ({"probability": 1.1}, "probability must be a number from 0 to 1, got 1.1"),
        ({"probability": float("nan")}, "probability must be a number from 0 to 1, got nan"),
        ({"probability": 0.5, "min_count": 2}, "probability and min_count exclude each other; give one of them"),
        ({"clock": "time"}, "clock 'time' needs expire_after or evict; say after how many seconds a key expires"),
        ({"evict": "lfu"}, "evict 'lfu' needs half_life; say after how many units of the clock"),
        ({"half_life": 3}, "half_life belongs to evict 'lfu'; use evict 'lfu', or remove half_life"),
        ({"count": "frames"}, "count 'frames' belongs to min_count; say after how many a key is admitted"),
        ({"forget_after": 9}, "forget_after belongs to min_count; say after how many occurrences a key is admitted"),
        ({"min_count": np.float64(3)}, "min_count must be an int from 1 to 2147483647, got"),
        ({"min_count": np.int64(0)}, "min_count must be an int from 1 to 2147483647, got"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ps.ConfigError) as error:
        ps.Dynamic(**settings)
    assert message in str(error.value)


def test_numbers_of_numpy_are_taken_and_survive_a_commit(tmp_path):
    dynamic = ps.Dynamic(min_count=np.int64(3), forget_after=np.int32(9), expire_after=np.uint8(5))
    assert dynamic == ps.Dynamic(min_count=3, forget_after=9, expire_after=5)
    assert ps.Dynamic(probability=np.float32(0.5)) == ps.Dynamic(probability=0.5)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table_of(dynamic)]))
    engine.save(tmp_path / "c")
    assert ps.Engine.restore(tmp_path / "c").config.table("user").dynamic == dynamic


def test_rejected_keys_wait_and_may_be_forgotten():
    assert ps.Dynamic(forget_after=9, on_full="reject").forget_after == 9


def test_a_table_takes_only_dynamic_settings():
    with pytest.raises(ps.ConfigError, match="dynamic must be a Dynamic or None, got 'lru'"):
        table_of("lru")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("evict { by: LFU }", "settings of table 'a': evict 'lfu' needs half_life"),
        ("expire { after: 0 }", "settings of table 'a': expire_after must be an int from 1 to 2147483647, got 0"),
        ("expire { }", "settings of table 'a': expire { } sets nothing; give after, or remove it"),
        ("expire { clock: STEPS }", "settings of table 'a': expire { } sets nothing; give after, or remove it"),
        ("admit { }", "settings of table 'a': admit { } sets nothing; give min_count or probability, or remove it"),
        ("admit { count: FRAMES }", "settings of table 'a': count 'frames' belongs to min_count"),
        ("missing: 7", "settings of table 'a': missing must be one of initial, zero, got 7"),
    ],
)
def test_a_file_with_wrong_settings_is_refused(settings, message, tmp_path):
    (tmp_path / "c.pbtxt").write_text(engine_text(f'table {{ name: "a" dynamic {{ {settings} }} }}'))
    with pytest.raises(ps.ConfigError) as error:
        ps.EmbeddingConfig.load(tmp_path / "c.pbtxt")
    assert message in str(error.value)


def test_a_callable_initializer_is_refused():
    config = ps.EmbeddingConfig.from_tables([table_of(ps.Dynamic(), initializer=lambda shape, dtype: 0)])
    with pytest.raises(ps.ConfigError, match="table 'user': a dynamic table cannot start from a Python callable"):
        config.table("user")


def test_an_optimizer_that_updates_untouched_rows_is_refused():
    table = ps.TableConfig(9, 4, name="user", optimizer=ps.Adam(0.1, lazy_adam=False), dynamic=ps.Dynamic())
    with pytest.raises(ps.ConfigError, match="updates every row once a step, but absent keys of a dynamic table"):
        ps.EmbeddingConfig.from_tables([table]).table("user")
