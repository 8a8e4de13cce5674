"""stage_fn and BlockStage: what data flows ship to their workers."""

import pickle
import subprocess
import sys

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from checkpoints import LOG, config_of, engine_of
from deltas import ALL_COLUMNS, bytes_of, equal, follow, follower_of, tables_of

import penstock as ps


def shipped(function):
    return pickle.loads(pickle.dumps(function))


def wanted():
    return bytes_of(engine_of().stage(LOG, **ALL_COLUMNS))


def test_a_pickled_stage_fn_gives_the_deltas_of_stage():
    function = ps.stage_fn(config_of(), num_required=3, **ALL_COLUMNS)
    assert bytes_of(shipped(function)(iter(LOG))) == wanted()
    assert bytes_of(shipped(shipped(function))(iter(LOG))) == wanted()


def test_each_call_of_a_stage_fn_has_a_new_engine():
    function = ps.stage_fn(config_of(), num_required=3, **ALL_COLUMNS)
    assert bytes_of(function(LOG)) == bytes_of(function(LOG)) == wanted()


def test_a_table_gives_a_table():
    deltas = ps.stage_fn(config_of(), num_required=3, **ALL_COLUMNS)(pa.Table.from_batches(LOG))
    assert isinstance(deltas, pa.Table)
    assert bytes_of(deltas.to_batches()) == wanted()


def test_a_data_set_goes_in_and_a_data_set_comes_out(tmp_path):
    (tmp_path / "gradients").mkdir()
    pyarrow.parquet.write_table(pa.Table.from_batches(LOG), tmp_path / "gradients" / "0.parquet")
    stage = ps.stage_fn(config_of(), num_required=3, **ALL_COLUMNS)
    reader = pyarrow.dataset.dataset(tmp_path / "gradients").scanner().to_reader()
    pyarrow.dataset.write_dataset(
        stage(reader), tmp_path / "deltas", schema=stage.schema, format="parquet", preserve_order=True
    )
    staged = pyarrow.dataset.dataset(tmp_path / "deltas").to_table().combine_chunks().to_pydict()
    assert staged == pa.Table.from_batches(engine_of().stage(LOG, **ALL_COLUMNS)).to_pydict()


def test_a_block_stage_continues_from_block_to_block():
    stage = shipped(ps.BlockStage(config_of(), num_required=3, **ALL_COLUMNS))
    deltas = [stage(pa.Table.from_batches(LOG[first : first + 4])) for first in range(0, len(LOG), 4)]
    assert bytes_of(batch for each in deltas for batch in each.to_batches()) == wanted()
    assert shipped(stage)(LOG[0]).num_rows == 0  # the copy has a separate engine, whose gate waits for three


def test_a_stage_fn_has_its_schema_before_its_engine_and_refuses_wrong_slots():
    function = ps.stage_fn(config_of(), op=True, **ALL_COLUMNS)
    assert function.schema.equals(engine_of().stage([], op=True, **ALL_COLUMNS).schema)
    with pytest.raises(ps.UsageError, match="no table has a slot 'momenta'"):
        ps.stage_fn(config_of(), slots=["momenta"])
    with pytest.raises(ps.UsageError, match=r"^StageFunction: unknown argument 'slot'; did you mean 'slots'\?$"):
        ps.stage_fn(config_of(), slot=True)
    with pytest.raises(ps.UsageError, match=r"^BlockStage: unknown argument 'trheads'; did you mean 'threads'\?$"):
        ps.BlockStage(config_of(), trheads=2)


def test_the_configuration_may_be_a_path_and_tables_may_be_given(tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    start, last = engine_of(seed=7), engine_of(seed=7)
    start.write_tables(tmp_path / "base")
    last.run(LOG)
    function = ps.stage_fn(tmp_path / "tables.pbtxt", num_required=3, init=tmp_path / "base", **ALL_COLUMNS)
    assert equal(follow(follower_of(start), function(LOG)).tables, tables_of(last))


def test_making_and_pickling_a_stage_fn_does_not_load_jax(tmp_path):
    (tmp_path / "function").write_bytes(pickle.dumps(ps.stage_fn(config_of())))
    code = (
        "import pickle, sys; function = pickle.load(open(sys.argv[1], 'rb')); function.schema; pickle.dumps(function);"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "function"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
