"""``penstock export --rows``: tables for serving, in 16 or 8 bits per value."""

import dynamic
import numpy as np
import pyarrow.parquet as pq
import pytest
from checkpoints import LOG, engine_of
from cli import error_line, table

import penstock as ps
from penstock.io.list_columns import row_values
from penstock.model.row_encodings import ENCODINGS, INT8

CONFIG = table()
ENCODED = ["bfloat16", "int8"]


def exported(path, name):
    """The ids and encoded rows of a table's file, and its schema."""
    read = pq.read_table(path / f"{name}.parquet").combine_chunks()
    column = read["row"].combine_chunks()
    return read["id"].to_numpy(), row_values(column, column.type.byte_width), read.schema


@pytest.mark.parametrize("rows", ENCODED)
def test_a_file_has_the_rows_of_the_commit_and_no_slots(rows, tmp_path, call):
    engine = engine_of()
    engine.run(iter(LOG), checkpoint=tmp_path / "c", every=1)
    text, printed = call(0, "export", tmp_path / "c", tmp_path / "out", "--rows", rows)
    assert f"{rows}, without slots" in text
    assert printed["rows"] == rows
    for name in ("user", "item"):
        weights = engine.retrieve_parameters(name)["parameters"]
        ids, values, schema = exported(tmp_path / "out", name)
        assert schema.names == ["id", "row"]
        assert schema.metadata[b"penstock.rows"] == rows.encode()
        assert ids.tolist() == list(range(len(weights)))
        assert values.tobytes() == ENCODINGS[rows].encode(weights).tobytes()


def test_the_bytes_are_the_same_for_any_threads_and_devices(tmp_path, call, mesh_of):
    files = []
    for number, arguments in enumerate(({"threads": 1}, {"threads": 3}, {"mesh": mesh_of(2)})):
        engine = engine_of(**arguments)
        engine.run(iter(LOG), checkpoint=tmp_path / f"c{number}", every=1 + number)
        call(0, "export", tmp_path / f"c{number}", tmp_path / f"out{number}", "--rows", "int8")
        files.append((tmp_path / f"out{number}" / "user.parquet").read_bytes())
    assert len(set(files)) == 1


def test_keys_of_a_dynamic_table(tmp_path, call):
    engine = dynamic.engine_of(dynamic.ALL_POLICIES, rows=32)
    engine.run([dynamic.log_of(dynamic.churning_steps(60))], checkpoint=tmp_path / "run", every=3)
    call(0, "export", tmp_path / "run", tmp_path / "out", "--rows", "int8")
    keys, values, schema = exported(tmp_path / "out", "user")
    assert keys.tolist() == engine.keys("user").to_pylist()
    assert schema.metadata[b"penstock.key_type"] == keys.dtype.name.encode()
    assert values.tobytes() == INT8.encode(engine.lookup("user", keys)).tobytes()


def test_keys_that_only_a_file_of_vectors_has_are_pointed_out(tmp_path, call):
    """A frozen dynamic table has no key of its own at all."""
    np.savez(tmp_path / "words.npz", word=np.ones((2, 4), np.float32), keys=np.array([5, -7]))
    start = ps.FromFile(tmp_path / "words.npz")
    table = ps.TableConfig(8, 4, start, name="word", trainable=False, dynamic=ps.Dynamic())
    ps.Engine(ps.EmbeddingConfig.from_tables([table])).save(tmp_path / "run")
    text, _ = call(0, "export", tmp_path / "run", tmp_path / "serving", "--rows", "int8")
    path = tmp_path / "words.npz"
    assert f"note      word: it has 0 keys; all others read their vectors in {path}, which are not exported" in text


def test_a_file_of_many_rows_has_less_than_a_third_of_the_bytes(tmp_path, call):
    wide = ps.TableConfig(20_000, 64, name="user", optimizer=ps.SGD(0.1))
    ps.Engine(ps.EmbeddingConfig.from_tables([wide])).save(tmp_path / "c")
    for rows in ("float32", "int8"):
        call(0, "export", tmp_path / "c", tmp_path / rows, "--rows", rows)
    sizes = [pq.read_metadata(tmp_path / rows / "user.parquet").row_group(0).column(1) for rows in ("float32", "int8")]
    assert sizes[1].total_uncompressed_size <= 0.30 * sizes[0].total_uncompressed_size


def test_constant_rows_keep_their_value(tmp_path, call):
    constant = ps.TableConfig(5, 3, ps.Constant(0.7), ps.SGD(0.1), name="user")
    ps.Engine(ps.EmbeddingConfig.from_tables([constant])).save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "out", "--rows", "int8")
    assert (INT8.decode(exported(tmp_path / "out", "user")[1]) == np.float32(0.7)).all()


def test_rows_that_are_not_finite_are_counted(tmp_path, call):
    engine = engine_of()
    engine.load_parameters("item", [[1, 2], [np.inf, 2], [3e38, -3e38]], ids=[0, 7, 9])
    engine.save(tmp_path / "c")
    text, printed = call(0, "export", tmp_path / "c", tmp_path / "out", "--rows", "int8")
    assert printed["not_finite"] == {"item": 2}
    assert "item: 2 rows infinite or NaN, the first of id 7; readers get no numbers" in text
    assert np.isnan(INT8.decode(exported(tmp_path / "out", "item")[1])[[7, 9]]).all()


@pytest.mark.parametrize("rows", ENCODED)
def test_rows_for_serving_are_no_start_of_a_run(rows, tmp_path, capsys, call, config):
    engine = ps.Engine(ps.EmbeddingConfig.load(config))
    engine.save(tmp_path / "c")
    call(0, "export", tmp_path / "c", tmp_path / "out", "--rows", rows)
    line = error_line(capsys, 3, "import", tmp_path / "out", tmp_path / "new", "--config", config)
    assert f"rows of {rows}, which are for serving; export the checkpoint without --rows" in line
    assert error_line(capsys, 3, "diff", tmp_path / "out", tmp_path / "out").count(rows) == 1


def test_an_unknown_encoding_is_a_wrong_flag(tmp_path, capsys):
    assert "int4" in error_line(capsys, 2, "export", tmp_path, tmp_path / "out", "--rows", "int4")
