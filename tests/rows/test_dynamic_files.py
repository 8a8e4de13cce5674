"""Tables of dynamic keys in files, in reports, and through features."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dynamic import ALL_POLICIES, churning_steps, engine_of, log_of, push

import penstock as ps


@pytest.mark.parametrize("key_type", ["int64", "uint64"])
def test_written_tables_hold_the_keys_and_are_read_again(tmp_path, key_type):
    engine = engine_of(ps.Dynamic(key_type=key_type), rows=5000)
    keys = np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64, endpoint=False).view(np.int64)
    push(engine, keys.view(np.uint64) if key_type == "uint64" else keys)
    (path,) = engine.write_tables(tmp_path)
    written = pq.read_table(path)
    assert written["id"].combine_chunks() == engine.keys("user")
    assert written.schema.metadata[b"penstock.key_type"] == key_type.encode()
    again = engine_of(ps.Dynamic(key_type=key_type, min_count=9), rows=5000)
    again.read_tables(tmp_path)
    assert again.keys("user") == engine.keys("user")
    ids = engine.keys("user").to_numpy()
    assert again.lookup("user", ids).tobytes() == engine.lookup("user", ids).tobytes()
    assert sorted(column for column in written.schema.names) == ["accumulators", "id", "row"]


def test_a_static_table_can_be_read_into_a_dynamic_one(tmp_path):
    static = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 4, name="user", optimizer=ps.Adagrad(0.1))]))
    static.write_tables(tmp_path)
    dynamic = engine_of(rows=9)
    dynamic.read_tables(tmp_path)
    assert dynamic.keys("user").to_pylist() == list(range(9))
    assert dynamic.lookup("user", range(9)).tobytes() == static.lookup("user", range(9)).tobytes()


def file_of(folder, keys, kind):
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(4 * len(keys), np.float32)), 4)
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(keys, kind), "row": rows}), folder / "user.parquet")
    return folder


@pytest.mark.sampled("kind0")
@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_a_key_that_is_twice_in_a_file_is_found_in_any_order_and_block(tmp_path, kind):
    """Also where the differences of neighbours exceed int64."""
    last = 2**63 if kind == pa.uint64() else -(2**63)
    around = np.array([0, 2**62, 2**63 - 1, last, last + 2**62, 0], str(kind))
    many = np.random.default_rng(1).permutation(200_000).astype(around.dtype) * (2**63 // 200_000)
    files = [around, np.append(many, many[3]), np.append(np.sort(many), many[3])]
    settings = ps.Dynamic(key_type=str(kind))
    for number, keys in enumerate(files):
        with pytest.raises(ps.InputError, match=f"id {keys[-1]} occurs twice"):
            engine_of(settings, rows=400_000).read_tables(file_of(tmp_path / str(number), keys, kind))
        engine = engine_of(settings, rows=400_000)
        engine.read_tables(file_of(tmp_path / str(number), keys[:-1], kind))
        assert engine.keys("user").to_pylist() == sorted(int(key) for key in keys[:-1])


def test_a_file_with_more_keys_than_rows_is_refused_whatever_its_blocks(tmp_path):
    """A table that evicts has room for each block of it, but not for all."""
    with pytest.raises(ps.StateError, match="no room for 1 of 8 new keys: 0 of 7 rows are in use"):
        engine_of(rows=7).read_tables(file_of(tmp_path, np.arange(8), pa.int64()))
    file_of(tmp_path, np.arange(100_000), pa.int64())
    with pytest.raises(ps.StateError, match=r"no room for all keys of one load: .* would be evicted again from 80000"):
        engine_of(ps.Dynamic(evict="lru"), rows=80_000).read_tables(tmp_path)
    engine = engine_of(ps.Dynamic(evict="lru"), rows=120_000)
    engine.read_tables(tmp_path)
    assert engine.keys("user").to_pylist() == list(range(100_000))


def test_the_report_accounts_for_every_key():
    engine = engine_of(ALL_POLICIES, rows=32)
    start = 0
    for first in (0, 30):
        log = log_of([[] for _ in range(first)] + churning_steps(60)[first : first + 30])
        report = engine.run([log])
        keys = report.tables["user"].keys
        assert start + keys.admitted - keys.expired - keys.evicted == keys.keys
        assert keys.keys - keys.expired_waiting == len(engine.keys("user"))
        assert keys.evicted > 0 < keys.unadmitted_rows
        assert ps.TableReport.from_dict(report.to_dict()["tables"]["user"]) == report.tables["user"]
        start = keys.keys
    static = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 4, name="user", optimizer=ps.Adagrad(0.1))]))
    assert static.run([log_of([[1]])]).to_dict()["tables"] == {"user": {"rows": 1, "distinct": 1}}


def test_an_orbax_checkpoint_is_refused_by_name(tmp_path):
    (tmp_path / "_METADATA").write_text("{}")
    engine = engine_of()
    before = engine.state_hash()
    with pytest.raises(ps.UsageError, match="table 'user' is dynamic, and an Orbax checkpoint has no keys: load files"):
        engine.read_tables(tmp_path)
    assert engine.state_hash() == before
