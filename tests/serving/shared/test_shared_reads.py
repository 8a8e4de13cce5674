"""Reads of shared tables give the rows of the engine, wherever they lie."""

import copy
import pickle

import jax
import numpy as np
import pytest
import reference_reads
from engines import engine_of, frame, stored
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps

ONE_DEVICE = jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])


def config_of(rows, dims, optimizer, sharding):
    tables = [ps.TableConfig(rows, dim, name=f"t{number}") for number, dim in enumerate(dims)]
    return stored(ps.EmbeddingConfig.from_tables(tables, optimizer), sharding=sharding)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 5, 63, 64, 65, 1000, 3000]),
    dims=st.lists(st.sampled_from([1, 3, 16, 33]), min_size=1, max_size=3),
    optimizer=st.sampled_from([ps.SGD, ps.Adagrad, ps.Adam]),
    sharding=st.sampled_from(["DIV", "MOD"]),
    devices=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_any_layout_are_those_of_the_engine_and_of_the_files(
    tmp_path_factory, rows, dims, optimizer, sharding, devices, seed
):
    folder, rng = tmp_path_factory.mktemp("shared"), np.random.default_rng(seed)
    mesh = jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])
    engine = ps.Engine(config_of(rows, dims, optimizer(0.1), sharding), mesh, shared=folder, threads=2)
    reader = ps.Reader(folder)
    for step in range(3):
        ids = {f"t{number}": rng.integers(0, rows, 50) for number in range(len(dims))}
        got = reader.lookup(ids, consistent=True)
        assert got.version == reader.version == engine.version == ps.Version(str(step))
        for name, wanted in ids.items():
            assert got[name].tobytes() == engine.lookup(name, wanted).tobytes()
            assert got[name].tobytes() == reference_reads.read(folder, name, wanted).tobytes()
        frame = {name: (ids[name], rng.standard_normal((50, dim))) for name, dim in zip(ids, dims, strict=True)}
        engine.apply(frame)


def test_a_step_that_changes_all_rows_is_read(tmp_path):
    engine = engine_of(ps.Adam(0.1, lazy_adam=False), dim=3, rows=2000, shared=tmp_path / "shared", threads=2)
    engine.apply({"t": ([7], np.ones((1, 3)))})
    engine.apply({"t": ([8], np.ones((1, 3)))})
    assert np.array_equal(ps.Reader(tmp_path / "shared").lookup("t", range(2000)), engine.lookup("t", range(2000)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda reader: pickle.loads(pickle.dumps(reader))])
def test_a_copy_of_a_reader_opens_the_folder_again(copied, tmp_path, monkeypatch):
    """As a DataLoader sends a dataset, with its reader, to processes that it spawns."""
    monkeypatch.chdir(tmp_path)
    engine = engine_of(shared="shared")
    again = copied(ps.Reader("shared", dtype="int8"))
    engine.apply({"t": frame([3])})
    monkeypatch.chdir("/")
    assert np.array_equal(again.lookup("t", [3]), ps.Reader(tmp_path / "shared", dtype="int8").lookup("t", [3]))


def test_rows_are_written_into_an_array_of_the_caller(tmp_path):
    engine_of(shared=tmp_path, rows=10)
    reader, out = ps.Reader(tmp_path), np.full((2, 2), np.nan, np.float32)
    assert reader.lookup("t", [3, 9], out) is out
    assert np.isfinite(out).all()
    for wrong in (np.empty((2, 3), np.float32), np.empty((2, 2)), np.empty((2, 4), np.float32)[:, ::2], [[0, 0]] * 2):
        with pytest.raises(
            ps.UsageError, match=r"table 't', out: expected a writable, contiguous float32 array of \(2, 2"
        ):
            reader.lookup("t", [3, 9], wrong)


def test_ids_and_tables_that_do_not_exist_are_named(tmp_path):
    engine_of(shared=tmp_path, rows=10)
    reader = ps.Reader(tmp_path)
    assert reader.lookup("t", []).shape == (0, 2)
    with pytest.raises(ps.UsageError, match="table 't': expected 0 <= id < 10, got 10"):
        reader.lookup("t", [3, 10])
    with pytest.raises(ps.UsageError, match=r"no table 'u' in .* \(t\)"):
        reader.lookup("u", [3])
    with pytest.raises(ps.UsageError, match="table 't': expected integer ids, got float64"):
        reader.lookup("t", [0.5])
    with pytest.raises(ps.UsageError, match="timeout_ms: expected at least 0, got -1"):
        reader.lookup("t", [3], timeout_ms=-1)


def test_ids_need_not_be_aligned_and_are_found_outside_in_any_table(tmp_path):
    tables = [ps.TableConfig(rows, 2, name=name, optimizer=ps.SGD(0.1)) for name, rows in (("t", 10), ("u", 5))]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables), shared=tmp_path)
    unaligned = np.frombuffer(b"0" + np.array([9, 3], np.int64).tobytes(), np.int64, offset=1)
    reader = ps.Reader(tmp_path)
    np.testing.assert_array_equal(reader.lookup("t", unaligned), engine.lookup("t", [9, 3]))
    for reads in (reader, engine.reads):
        with pytest.raises(ps.UsageError, match="table 'u': expected 0 <= id < 5, got 9"):
            reads.lookup({"t": unaligned, "u": unaligned})
        with pytest.raises(ps.UsageError, match="table 't': expected 0 <= id < 10, got -1"):
            reads.lookup({"t": [3, -1]}, consistent=True)
        with pytest.raises(ps.UsageError, match=f"table 't': expected 0 <= id < 10, got {2**64 - 1}"):
            reads.lookup({"t": np.array([2**64 - 1], np.uint64)})


def test_a_closed_reader_says_so(tmp_path):
    engine_of(shared=tmp_path, rows=10)
    with ps.Reader(tmp_path) as reader:
        assert "tables: t; step 0" in repr(reader)
    assert "closed" in repr(reader)
    with pytest.raises(ps.UsageError, match="this reader is closed"):
        reader.lookup("t", [3])


def test_rows_of_one_step_are_waited_for_no_longer_than_the_timeout(tmp_path):
    engine = engine_of(shared=tmp_path, rows=10)
    reader = ps.Reader(tmp_path)
    engine.reads.before_step({})  # a step begins, and does not end
    with pytest.raises(ps.ReadTimeoutError, match=r"no rows after 5 ms: step 1 runs, .* give a larger timeout_ms"):
        reader.lookup("t", [3], consistent=True, timeout_ms=5)
    assert reader.lookup("t", [3]).shape == (1, 2)
    engine.apply({"t": frame([3])})
    assert reader.lookup({"t": [3]}, consistent=True).version.step == 1


@pytest.mark.parametrize(
    ("method", "error", "change"),
    [
        ("apply", RuntimeError, lambda engine: engine.apply({"t": ([3], np.ones((1, 2)))})),
        ("set_rows", KeyboardInterrupt, lambda engine: engine.load_parameters("t", np.ones((1, 2)), ids=[4])),
    ],
    ids=["step", "load"],
)
def test_a_step_or_a_load_that_failed_half_way_is_refused(method, error, change, tmp_path, monkeypatch):
    engine = engine_of(shared=tmp_path, rows=10)
    reader = ps.Reader(tmp_path)

    def fail(*arguments):
        raise error

    monkeypatch.setattr(engine.core.tables, method, fail)
    with pytest.raises(error):
        change(engine)
    with pytest.raises(ps.StateError, match="a step of its writer failed half way; start the writer again"):
        reader.lookup("t", [3])


def test_loads_are_read_and_a_step_is_durable_once_it_is_committed(tmp_path):
    engine = engine_of(shared=tmp_path / "shared", rows=10)
    reader = ps.Reader(tmp_path / "shared")
    engine.load_parameters("t", np.ones((1, 2)), ids=[4])
    assert reader.lookup("t", [4], consistent=True).tolist() == [[1, 1]]
    engine.apply({"t": ([4], np.ones((1, 2)))})
    assert (reader.version.step, reader.durable_step) == (1, 0)
    engine.save(tmp_path / "checkpoint")
    assert (reader.version.step, reader.durable_step) == (1, 1)


def test_more_threads_than_have_counters_are_not_used(tmp_path):
    engine = engine_of(shared=tmp_path, rows=10_000, threads=1030)
    engine.apply({"t": frame(range(10_000))})
    assert np.array_equal(ps.Reader(tmp_path).lookup("t", range(10_000)), engine.lookup("t", range(10_000)))


def test_a_global_step_below_0_is_read_and_committed(tmp_path):
    engine = engine_of(shared=tmp_path / "shared")
    engine.gate.set_global_step(-5)
    engine.apply({"t": frame([3])})
    reader = ps.Reader(tmp_path / "shared")
    assert reader.version.step == engine.global_step == -4
    engine.save(tmp_path / "checkpoint")
    assert reader.durable_step == -4


# ---- in this process


def test_threads_of_the_process_read_without_the_lock(tmp_path):
    engine = engine_of(rows=10)
    before = engine.lookup("t", [3])
    with engine.still():
        rows = engine.reads.lookup({"t": [3]}, consistent=True)
    assert (rows["t"].tolist(), rows.version.step) == (before.tolist(), 0)
    engine.apply({"t": ([3], np.ones((1, 2)))})
    rows = engine.reads.lookup({"t": [3]})
    assert (rows["t"].tolist(), rows.version.step) == (engine.lookup("t", [3]).tolist(), 1)


def test_a_view_shows_every_step_without_a_copy_and_cannot_be_written():
    engine = engine_of(ps.Adagrad(0.1), rows=1500, dim=3, mesh=ONE_DEVICE)
    view = engine.view("t")
    engine.apply({"t": ([3, 1499], np.ones((2, 3)))})
    with engine.still():
        assert np.array_equal(view, engine.table("t"))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        view.flags.writeable = True


def test_a_view_of_rows_in_another_order_is_refused():
    config = config_of(10, [2], ps.SGD(0.1), "MOD")
    with pytest.raises(ps.UsageError, match="table 't0' lies by MOD sharding, not in the order of its ids; copy it"):
        ps.Engine(config, ONE_DEVICE).view("t0")
    with pytest.raises(ps.UsageError, match="table 't' lies in 8 parts, not in the order of its ids; copy it"):
        engine_of(mesh=jax.make_mesh((8,), ("rows",))).view("t")
