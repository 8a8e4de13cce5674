"""Row-wise Adagrad stores one number per row: in memory, in files, in deltas and in commits."""

from functools import partial

import engines
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from device_table import shapes_of

import penstock as ps
from penstock.cli import main
from penstock.rows.bridge.sharding import Layout

ROWS, DIM = 40, 8


config_of = partial(engines.config_of, ps.RowWiseAdagrad(0.125), ("user",), DIM, ROWS)


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


def test_deltas_continue_a_base_with_one_number_per_row(tmp_path, capsys):
    folder = tmp_path / "run"
    trained().save(folder)
    ps.Engine.restore(folder).run(log(range(6)), checkpoint=folder, every=2, resume=True)
    trained(6).save(tmp_path / "new")
    assert ps.Engine.restore(folder).state_hash() == trained(6).state_hash()
    assert main(["diff", str(folder), str(tmp_path / "new")]) == 0
    assert "every bit" in capsys.readouterr().out


# ---- users and files


@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])  # rows of the last one share lines, as on a TPU
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


def test_a_slot_as_wide_as_the_weights_is_refused(tmp_path):
    engine = trained()
    wide = np.repeat(engine.retrieve_parameters("user")["accumulators"], DIM, axis=1)
    (path,) = engine.write_tables(tmp_path)
    table = pq.read_table(path)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(wide.reshape(-1)), DIM)
    pq.write_table(table.set_column(table.schema.get_field_index("accumulators"), "accumulators", lists), path)
    with pytest.raises(ps.InputError, match="accumulators"):
        ps.Engine(config_of()).read_tables(tmp_path)


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
    arrays = trained(0).core.tables.table("user").backend.arrays
    assert sum(array.nbytes for array in arrays) == 4 * 1024 * (DIM + 1)  # a row per virtual shard


@pytest.mark.parametrize(("dim", "floats"), [(8, 128), (32, 128), (128, 128), (200, 256)])
def test_on_a_tpu_the_numbers_of_a_line_are_all_that_the_line_is_wider(dim, floats):
    layout = Layout("t", 100_000, dim, 1, 4, False, 128, row_slots=True)
    lines = 4 * layout.lines_per_device
    assert shapes_of(layout) == [(lines, 1 if dim < 200 else 2, 128), (lines * layout.line.group,)]
    assert layout.nbytes == 4 * lines * (floats + max(1, 128 // dim))


# ---- keys
