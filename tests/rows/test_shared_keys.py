"""Keys of dynamic tables, read without a lock: those of the engine's directory, whatever comes, goes and moves."""

import threading

import numpy as np
import pytest
import reference_reads
from dynamic import ALL_POLICIES, churning_steps, engine_of, push
from hypothesis import given
from hypothesis import strategies as st
from openings import hashed

import penstock as ps
from penstock.pyx.row_keys import RowKeys, num_words

EDGES = [-(2**63), -1, 0, 1, 2, 2**63 - 1]


def keys_of(capacity):
    return RowKeys(np.zeros(num_words(capacity), np.uint64), capacity, salt=7)


@given(st.lists(st.tuples(st.sampled_from(EDGES + list(range(10, 30))), st.booleans()), max_size=200))
def test_keys_have_the_rows_of_a_dict(operations):
    keys, twin, free = keys_of(8), {}, list(range(8))
    for key, is_inserted in operations:
        if is_inserted and key not in twin and free:
            twin[key] = free.pop()
            keys.insert(np.array([key]), np.array([twin[key]]))
        elif not is_inserted:
            keys.remove(np.array([key]))
            free += [twin.pop(key)] if key in twin else []
        every = np.array(EDGES + list(range(10, 30)))
        assert keys.rows(every).tolist() == [twin.get(key, -1) for key in every.tolist()]
        assert dict(zip(*(array.tolist() for array in keys.items()), strict=True)) == twin


def test_marks_of_removed_keys_do_not_fill_the_table():
    capacity = 1000
    memory = np.zeros(num_words(capacity), np.uint64)
    keys = RowKeys(memory, capacity, salt=7)
    keys.insert(hashed(np.arange(capacity)), np.arange(capacity))
    for turn in range(300):
        old, new = (hashed(np.arange(first, first + 100)) for first in (100 * turn, capacity + 100 * turn))
        rows = keys.rows(old)
        keys.remove(old)
        keys.insert(new, rows)
    states = memory[8 : 8 + 2 * (3 * capacity + 1)].reshape(-1, 2)[:, 1]
    assert (states >= 2).sum() == capacity
    assert (states == 0).mean() > 0.2  # where the probes for absent keys end


def test_more_keys_than_rows_and_rows_outside_are_refused():
    keys = keys_of(4)
    with pytest.raises(ValueError, match="expected 0 <= row < 4, got 4"):
        keys.insert(np.array([1]), np.array([4]))
    with pytest.raises(ValueError, match="expected 21 words for 4 rows" if num_words(4) == 21 else "words for 4 rows"):
        RowKeys(np.zeros(3, np.uint64), 4)
    memory = np.zeros(num_words(4), np.uint64)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="the keys are of another writer"):
        RowKeys(memory, 4).remove(np.array([1]))


@pytest.mark.parametrize("missing", ["initial", "zero"])
@pytest.mark.parametrize("start", [ps.TruncatedNormal(0.0, 0.5), ps.Uniform(-1.0, 2.0), ps.Constant(3.0)])
def test_keys_read_as_in_the_engine_while_they_wait_expire_and_are_evicted(tmp_path, missing, start):
    dynamic = ps.Dynamic(min_count=2, expire_after=9, evict="lru", missing=missing)
    table = ps.TableConfig(64, 4, start, ps.Adagrad(0.1), name="user", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared=tmp_path, seed=3)
    reader, every = ps.Reader(tmp_path), np.concatenate([hashed(np.arange(80)), EDGES])
    for keys in churning_steps(40):
        push(engine, keys)
        rows = reader.lookup("user", every, consistent=True)
        assert rows.tobytes() == engine.lookup("user", every).tobytes()
        assert rows.tobytes() == engine.reads.lookup("user", every).tobytes()
    present = engine.records("user", every)["present"]
    assert 0 < present.sum() < len(every)
    twin = reference_reads.read(tmp_path, "user", every)
    assert np.array_equal(twin[present], rows[present])


def test_keys_of_uint64_and_absent_keys_that_are_their_own_rows(tmp_path):
    dynamic = ps.Dynamic(key_type="uint64")
    table = ps.TableConfig(64, 4, ps.RowIdInitializer(0), ps.SGD(0.1), name="user", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared=tmp_path)
    keys = np.array([2**63 + 5, 7, 2**64 - 1], np.uint64)
    push(engine, keys[:2])
    assert ps.Reader(tmp_path).lookup("user", keys).tobytes() == engine.lookup("user", keys).tobytes()


def test_keys_of_a_commit_are_shared_when_it_is_restored_and_has_grown(tmp_path):
    engine = engine_of(ALL_POLICIES)
    for keys in churning_steps(20):
        push(engine, keys)
    engine.save(tmp_path / "checkpoint")
    every = hashed(np.arange(60))
    first = ps.Engine.restore(tmp_path / "checkpoint", shared=tmp_path / "shared")
    reader = ps.Reader(tmp_path / "shared")
    assert np.array_equal(reader.lookup("user", every), engine.lookup("user", every))
    del first
    table = ps.TableConfig(500, 4, name="user", optimizer=ps.Adagrad(0.1), dynamic=ALL_POLICIES)
    larger = ps.EmbeddingConfig.from_tables([table])
    grown = ps.Engine.restore(tmp_path / "checkpoint", config=larger, shared=tmp_path / "shared")
    push(grown, hashed(np.arange(1000, 1400)))
    push(grown, hashed(np.arange(1000, 1400)))
    every = np.concatenate([every, hashed(np.arange(1000, 1400))])
    assert np.array_equal(reader.lookup("user", every), grown.lookup("user", every))


def test_a_row_that_passes_to_another_key_is_never_read_for_the_first(tmp_path):
    """Every row is its key plus a whole number of steps; keys take each other's rows all the time."""
    dynamic = ps.Dynamic(evict="lru", missing="zero")
    table = ps.TableConfig(64, 4, ps.RowIdInitializer(0), ps.SGD(1.0), name="user", dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared=tmp_path)
    every, wrong, is_over = np.arange(1, 400) * 1000, [], threading.Event()

    def watch():
        reader = ps.Reader(tmp_path)
        while not is_over.is_set():
            rows = reader.lookup("user", every)
            off = rows - every[:, None]
            bad = (rows != 0).any(axis=1) & ((off < -500) | (off > 0) | (off != off[:, :1])).any(axis=1)
            wrong.extend(every[bad].tolist())

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    rng = np.random.default_rng(0)
    for _ in range(400):
        push(engine, rng.choice(every, 40, replace=False))
    is_over.set()
    for watcher in watchers:
        watcher.join()
    assert wrong == []
