"""Engines with dynamic tables: which keys they take, admit, expire and evict, and what they answer."""

import numpy as np
import pyarrow as pa
import pytest
from dynamic import ALL_POLICIES, engine_of, push

import penstock as ps


def test_keys_of_the_whole_range_by_type():
    keys = [-(2**63), -1, 0, 1, 2**63 - 1]
    engine = engine_of()
    push(engine, keys)
    assert engine.keys("user").to_pylist() == sorted(keys)
    unsigned = engine_of(ps.Dynamic(key_type="uint64"))
    push(unsigned, np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64))
    assert unsigned.keys("user") == pa.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], pa.uint64())
    assert unsigned.records("user", np.array([2**64 - 1, 5], np.uint64))["present"].tolist() == [True, False]
    assert unsigned.records("user", [2**64 - 1, 5])["present"].tolist() == [True, False]
    with pytest.raises(ps.UsageError, match="table 'user': expected 0 <= id < 18446744073709551616, got -1"):
        unsigned.lookup("user", [2**64 - 1, -1])
    with pytest.raises(ps.UsageError, match="table 'user': expected integer ids, got float64"):
        unsigned.lookup("user", [0.5])
    with pytest.raises(ps.UsageError, match="table 'user', ids: expected an array, got set"):
        unsigned.lookup("user", {1, 2})


def test_lists_of_small_and_large_keys_are_taken_exactly():
    unsigned = engine_of(ps.Dynamic(key_type="uint64"))
    unsigned.apply({"user": ([2**64 - 1, 0, 2**53 + 1], np.ones((3, 4), np.float32))})
    assert unsigned.keys("user").to_pylist() == [0, 2**53 + 1, 2**64 - 1]
    for engine, ids, message in (
        (unsigned, [2**64 - 1, 5, -1], "row 2, column 'id': expected 0 <= id < 18446744073709551616, got -1"),
        (engine_of(), [-1, 2**63], "row 1, column 'id': expected an int64 id, got 9223372036854775808"),
        (engine_of(), [-1, 0.5], "expected integers of shape .n,., got float64 of shape .2,."),
    ):
        with pytest.raises(ps.InputError, match=f"apply.'user'.: {message}"):
            engine.apply({"user": (ids, np.ones((len(ids), 4), np.float32))})


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64, np.int64])
def test_a_number_is_the_same_key_in_every_type(kind):
    engine = engine_of()
    push(engine, np.array([7, 9], kind))
    push(engine, np.array([7], np.int64))
    assert engine.keys("user").to_pylist() == [7, 9]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.int64()])
def test_a_number_is_the_same_key_in_every_column(kind):
    engine, other = engine_of(), engine_of()
    for each, id_type in ((engine, kind), (other, pa.int64())):
        gradient = pa.array([[1.0] * 4] * 3, pa.list_(pa.float32(), 4))
        each.run([pa.record_batch({"id": pa.array([7, 9, 7], id_type), "gradient": gradient})])
    assert engine.state_hash() == other.state_hash()
    assert engine.keys("user").to_pylist() == [7, 9]


@pytest.mark.parametrize(
    ("key_type", "ids", "message"),
    [
        (
            "int64",
            np.array([2**63], np.uint64),
            "expected an int64 id .key_type of table 'user'., got 9223372036854775808; keys from 2.63 on need "
            'key_type="uint64" .in text UINT64.',
        ),
        (
            "uint64",
            np.array([-1]),
            "expected 0 <= id < 18446744073709551616 .key_type of table 'user'., got -1; negative keys need "
            'key_type="int64" .in text INT64.',
        ),
    ],
)
def test_keys_outside_the_type_are_bad_rows(key_type, ids, message):
    engine = engine_of(ps.Dynamic(key_type=key_type))
    with pytest.raises(ps.InputError, match=message) as error:
        push(engine, ids)
    assert error.value.reason == "id_out_of_range"
    with pytest.raises(ps.UsageError, match=r"table 'user': expected .* need key_type="):
        engine.lookup("user", ids)


def test_absent_keys_show_their_initial_row_or_zero():
    initial, zero = engine_of(), engine_of(ps.Dynamic(missing="zero"))
    static = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(99, 4, name="user", optimizer=ps.SGD(1.0))]))
    keys = [3, 98, 3]
    assert initial.lookup("user", keys).tobytes() == static.lookup("user", keys).tobytes()
    assert not zero.lookup("user", keys).any()
    assert np.isfinite(initial.lookup("user", [-1, 2**62])).all()


def test_reading_changes_nothing():
    engine = engine_of(ALL_POLICIES, rows=8)
    push(engine, [1, 1, 2])
    before = engine.state_hash()
    engine.lookup("user", [1, 2, 3])
    engine.keys("user")
    engine.records("user", [1, 2, 3])
    engine.rows("user", [1, 2, 3])
    list(engine.stage([]))
    assert engine.state_hash() == before


def test_a_key_waits_explains_itself_and_starts_with_the_step_that_admits_it():
    engine = engine_of(ps.Dynamic(min_count=3), optimizer=ps.SGD(1.0))
    start = engine.lookup("user", [5])
    push(engine, [5, 5])
    assert engine.explain("user", 5) == "waits: 2 of 3 rows, last at step 0"
    assert engine.lookup("user", [5]).tobytes() == start.tobytes()
    push(engine, [5])
    assert engine.explain("user", 5) == "present; last at step 1"
    np.testing.assert_array_equal(engine.lookup("user", [5]), start - 1)
    assert engine.explain("user", 6) == "absent"
    for keys in ([], [5, 6]):
        with pytest.raises(ps.UsageError, match="table 'user': expected one key, got "):
            engine.explain("user", keys)
    assert engine.core.tables.dynamic["user"].directory.counts["unadmitted_rows"] == 2


def test_stale_frames_neither_count_nor_stamp():
    engine = engine_of(ps.Dynamic(min_count=2))
    push(engine, [1, 1])
    before = engine.state_hash()
    assert not push(engine, [1, 5, 5], local_step=0)
    assert engine.state_hash() == before


def test_two_frames_of_one_opening_count_together_also_without_accumulation():
    for optimizer in (ps.SGD(1.0), ps.SGD(1.0, use_gradient_accumulation=False)):
        engine = engine_of(ps.Dynamic(min_count=2), optimizer=optimizer, num_required=2, reduction="sum")
        start = engine.lookup("user", [5])
        push(engine, [5, 6])
        push(engine, [5])
        assert engine.keys("user").to_pylist() == [5]
        np.testing.assert_allclose(engine.lookup("user", [5]), start - 2, rtol=1e-6)


def test_evicted_keys_return_with_their_initial_rows_and_slots():
    engine = engine_of(ps.Dynamic(evict="lru"), rows=1)
    push(engine, [5])
    first = engine.lookup("user", [5])
    push(engine, [6])
    assert engine.keys("user").to_pylist() == [6]
    push(engine, [5])
    assert engine.lookup("user", [5]).tobytes() == first.tobytes()


def test_loads_admit_without_a_filter():
    engine = engine_of(ps.Dynamic(min_count=9), rows=2)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    engine.load_parameters("user", rows, ids=[-7, 10**15], accumulators=rows + 1)
    assert engine.lookup("user", [-7, 10**15]).tobytes() == rows.tobytes()
    with pytest.raises(ps.CapacityError, match=r"no room for 1 of 1 new keys: .*; set a larger vocabulary_size$"):
        engine.load_parameters("user", rows, ids=[-7, 4], accumulators=rows)
    assert engine.lookup("user", [-7, 10**15]).tobytes() == rows.tobytes()
    assert engine.core.failure.reason is None
    with pytest.raises(ps.UsageError, match="an id occurs twice in ids"):
        engine.load_parameters("user", rows, ids=[-7, -7], accumulators=rows)
    with pytest.raises(ps.UsageError, match="table 'user' is dynamic: name the keys of the rows, with ids="):
        engine.load_parameters("user", rows, accumulators=rows)


@pytest.mark.parametrize("read", ["table", "slots", "retrieve_parameters"])
def test_a_dynamic_table_is_not_read_as_a_whole(read):
    with pytest.raises(ps.UsageError, match=r"'user' is dynamic: its rows are read by key, with keys\(\)"):
        getattr(engine_of(), read)("user")


def test_a_static_table_has_no_keys():
    static = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 4, name="user", optimizer=ps.SGD(1.0))]))
    with pytest.raises(ps.UsageError, match="table 'user' is not dynamic: its ids are all below 9"):
        static.keys("user")


def test_a_bad_row_found_late_leaves_no_trace():
    engine = engine_of(ps.Dynamic(min_count=1))
    before = engine.state_hash()
    bad = np.ones((3, 4), np.float32)
    bad[2, 3] = np.nan
    with pytest.raises(ps.InputError, match="finite"):
        engine.apply({"user": (np.array([1, 2, 3]), bad)})
    assert engine.state_hash() == before
