"""Row-wise Adagrad keeps one number per row: in memory, for users, in files, deltas and commits, old ones included.

tests/data/row_wise_version_2 was written when the slot repeated the number in every column: the base and the delta of
``run(log(range(3)), checkpoint=…, every=2)`` with the seed 3.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engines import hash_of_wide_slots

import penstock as ps
from penstock.bridge.sharding import Layout
from penstock.cli import main

OLD = Path(__file__).parent / "data" / "row_wise_version_2"
OLD_HASH = "d32c62859fdc1487158752d381e247616c4360f98994ec05d7dc57c39d0e045d"
ROWS, DIM = 40, 8


def config_of(dynamic=None, **settings):
    table = ps.TableConfig(ROWS, DIM, name="user", optimizer=ps.RowWiseAdagrad(0.125), dynamic=dynamic, **settings)
    return ps.EmbeddingConfig.from_tables([table])


def log(steps):
    for step in steps:
        rng = np.random.default_rng(step)
        ids = np.sort(rng.permutation(ROWS)[:12])
        grads = rng.integers(-8, 9, (12, DIM)).astype(np.float32) / 8
        gradient = pa.FixedSizeListArray.from_arrays(pa.array(grads.reshape(-1)), DIM)
        yield pa.RecordBatch.from_pydict({"id": ids, "gradient": gradient, "step": np.full(12, step)})


def trained(steps=3, **options):
    engine = ps.Engine(config_of(), seed=3, **options)
    engine.run(log(range(steps)))
    return engine


# ---- commits


def test_a_checkpoint_with_the_number_in_every_column_is_restored_bit_for_bit(tmp_path):
    engine = ps.Engine.restore(shutil.copytree(OLD, tmp_path / "run"))
    assert engine.slots("user")["accumulators"].shape == (ROWS, 1)
    assert hash_of_wide_slots(engine) == OLD_HASH
    assert engine.state_hash() == trained().state_hash()


def test_deltas_of_one_number_per_row_continue_a_base_with_the_number_in_every_column(tmp_path, capsys):
    folder = shutil.copytree(OLD, tmp_path / "run")
    ps.Engine.restore(folder).run(log(range(6)), checkpoint=folder, every=2, resume=True)
    resumed = ps.Engine.restore(folder)
    assert sorted(path.name for path in folder.glob("*.base")) == ["00000001.base"]
    assert resumed.state_hash() == trained(6).state_hash()
    trained(6).save(tmp_path / "new")
    assert main(["diff", str(folder), str(tmp_path / "new")]) == 0
    assert "every bit" in capsys.readouterr().out


def test_rows_of_an_older_checkpoint_become_keys_of_a_dynamic_table(tmp_path):
    folder = shutil.copytree(OLD, tmp_path / "run")
    engine = ps.Engine.restore(folder, config=config_of(ps.Dynamic()))
    keys = engine.keys("user").to_numpy()
    assert 12 < len(keys) < ROWS
    assert engine.lookup("user", np.arange(ROWS)).tobytes() == np.asarray(trained().table("user")).tobytes()


def test_a_commit_is_smaller_by_the_columns_that_are_not_repeated(tmp_path):
    trained().save(tmp_path / "new")
    (base,) = (tmp_path / "new").glob("*.base")
    saved = 4 * ROWS * (DIM - 1)
    assert base.stat().st_size < (OLD / "00000001.base").stat().st_size - saved + 100


# ---- users and files


@pytest.mark.parametrize("variant", ["ffi", "xla", "pallas"])  # rows of the last one share lines, as on a TPU
def test_the_slot_is_read_and_loaded_with_one_column(variant, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    engine, other = trained(), ps.Engine(config_of())
    parts = engine.retrieve_parameters("user")
    assert [part.shape for part in parts.values()] == [(ROWS, DIM), (ROWS, 1)]
    other.load_parameters("user", parts["parameters"], accumulators=parts["accumulators"])
    assert np.asarray(other.slots("user")["accumulators"]).tobytes() == parts["accumulators"].tobytes()
    with pytest.raises(ps.PenstockError, match=r"table 'user', accumulators: expected shape \(40, 1\), got \(40, 8\)"):
        other.load_parameters("user", parts["parameters"], accumulators=np.ones((ROWS, DIM)))


def test_written_tables_and_exports_have_one_number_per_row(tmp_path):
    engine = trained()
    engine.write_tables(tmp_path / "out")
    engine.save(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    written, exported = (pq.read_table(tmp_path / folder / "user.parquet") for folder in ("out", "exported"))
    assert written.equals(exported, check_metadata=True)
    assert written.schema.field("accumulators").type.list_size == 1
    other = ps.Engine(config_of())
    other.read_tables(tmp_path / "out")
    assert main(["diff", str(tmp_path / "out"), str(tmp_path / "run")]) == 0
    assert other.retrieve_parameters("user")["accumulators"].tobytes() == slot_bytes(engine)


def slot_bytes(engine):
    return engine.retrieve_parameters("user")["accumulators"].tobytes()


def widened(path, change=None):
    """Rewrite a file of tables as earlier versions wrote it: the number in every column."""
    table = pq.read_table(path)
    slot = np.repeat(table["accumulators"].combine_chunks().flatten().to_numpy(), DIM).reshape(-1, DIM)
    if change is not None:
        slot[change, 3] += 1
    lists = pa.FixedSizeListArray.from_arrays(pa.array(slot.reshape(-1)), DIM)
    pq.write_table(table.set_column(table.schema.get_field_index("accumulators"), "accumulators", lists), path)


def test_files_with_the_number_in_every_column_are_read(tmp_path):
    engine, other = trained(), ps.Engine(config_of())
    (path,) = engine.write_tables(tmp_path)
    widened(path)
    other.read_tables(tmp_path)
    assert slot_bytes(other) == slot_bytes(engine)


def test_a_file_with_different_numbers_in_a_row_is_refused_with_the_row(tmp_path):
    (path,) = trained().write_tables(tmp_path)
    widened(path, change=17)
    with pytest.raises(ps.InputError, match=r"row 17, column 'accumulators': expected one number per row, got several"):
        ps.Engine(config_of()).read_tables(tmp_path)


def test_an_orbax_checkpoint_with_the_number_in_every_column_is_read(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="an extra: pip install -e '.[orbax]'")
    from penstock.tables.orbax import save_tree

    engine, other = trained(), ps.Engine(config_of())
    parts = engine.retrieve_parameters("user")
    for name, slot in (("new", parts["accumulators"]), ("old", np.repeat(parts["accumulators"], DIM, axis=1))):
        save_tree(tmp_path / name, {"user": {**parts, "accumulators": slot}})
        other.read_tables(tmp_path / name)
        assert slot_bytes(other) == slot_bytes(engine)


def test_deltas_contain_the_slot_as_lists_of_one_number():
    engine, slots = ps.Engine(config_of(), seed=3), {}
    for batch in engine.stage(log(range(3)), slots=True, numbered=True):
        slots |= dict(zip(batch["id"].to_pylist(), batch["accumulators"].to_pylist(), strict=True))
    wanted = engine.retrieve_parameters("user")["accumulators"].tolist()
    assert {number: wanted[number] for number in slots} == slots


# ---- memory


def test_a_row_takes_one_number_more_than_its_weights(tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    assert main(["validate", str(tmp_path / "c.pbtxt")]) == 0
    assert "weights 1.3 kB, slots 160 bytes" in capsys.readouterr().out
    (array,) = trained(0).core.tables.table("user").arrays
    assert array.nbytes == 4 * 1024 * (DIM + 1)  # a row per virtual shard


@pytest.mark.parametrize(("dim", "floats"), [(8, 128), (32, 128), (128, 128), (200, 256)])
def test_on_a_tpu_the_numbers_of_a_line_are_all_that_the_line_is_wider(dim, floats):
    layout = Layout("t", 100_000, dim, 1, 4, False, 128, row_slots=True)
    lines = 4 * layout.lines_per_device
    assert layout.shapes == ((lines, 1 if dim < 200 else 2, 128), (lines * layout.line.group,))
    assert layout.nbytes == 4 * lines * (floats + max(1, 128 // dim))


@pytest.mark.parametrize("layout", ["plain", "tiled"])
@pytest.mark.parametrize("devices", [1, 3])
def test_tables_of_every_layout_end_with_the_same_bits(layout, devices, mesh_of, monkeypatch):
    wanted = trained(6).state_hash()
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    engine = trained(6, mesh=mesh_of(devices))
    assert engine.core.tables.table("user").variant == "xla"
    assert engine.state_hash() == wanted


# ---- keys


def test_a_key_that_comes_back_has_the_accumulator_that_it_started_with():
    engine = ps.Engine(config_of(ps.Dynamic(expire_after=1)), seed=3)
    engine.load_parameters("user", np.ones((1, DIM)), ids=[7], accumulators=np.full((1, 1), 9.0))
    assert engine.core.tables.dynamic["user"].read(np.array([7, 8]), 1).tolist() == [[9.0], [np.float32(0.1)]]
    for _ in range(4):
        engine.apply({"user": (np.array([5]), np.ones((1, DIM), np.float32))})
    engine.apply({"user": (np.array([7]), np.zeros((1, DIM), np.float32))})
    assert engine.core.tables.dynamic["user"].read(np.array([7]), 1).tolist() == [[np.float32(0.1)]]
