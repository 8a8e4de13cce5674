"""Exports of checkpoints to safetensors and Orbax, and tables of Orbax that are read again."""

import sys

import dynamic
import numpy as np
import pytest
from checkpoints import LOG, ROWS, engine_of
from cli import outcome

import penstock as ps
from penstock.contrib.formats.orbax_checkpoint import save_tree
from penstock.model.row_encodings import ENCODINGS


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with a delta, and the engine that it is of."""
    engine = engine_of()
    engine.run(iter(LOG[:10]), checkpoint=tmp_path / "c", every=1)
    return tmp_path / "c", engine


def test_safetensors_holds_every_part_by_name(saved, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    folder, engine = saved
    assert outcome(capsys, "export", folder, tmp_path / "t.safetensors", "--format", "safetensors")[0] == 0
    tensors = safetensors.load_file(tmp_path / "t.safetensors")
    assert set(tensors) == {"user/parameters", "user/accumulators", "item/parameters"}
    assert tensors["user/accumulators"].tobytes() == engine.retrieve_parameters("user")["accumulators"].tobytes()


def test_export_to_safetensors_has_the_keys(tmp_path, call):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    engine = dynamic.engine_of(dynamic.ALL_POLICIES, rows=32)
    engine.run([dynamic.log_of(dynamic.churning_steps(60))], checkpoint=tmp_path / "run")
    call(0, "export", tmp_path / "run", tmp_path / "all.safetensors", "--format", "safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    assert tensors["user/keys"].tolist() == engine.keys("user").to_pylist()
    np.testing.assert_array_equal(tensors["user/parameters"], engine.lookup("user", tensors["user/keys"]))


@pytest.mark.parametrize(("rows", "width", "dtype"), [("bfloat16", 4, "bfloat16"), ("int8", 4 + 8, "uint8")])
def test_weights_for_serving_in_safetensors_and_orbax(rows, width, dtype, tmp_path, call):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    orbax = pytest.importorskip("orbax.checkpoint", reason="an extra: pip install 'penstock[orbax]'")
    engine = dynamic.engine_of(dynamic.ALL_POLICIES, rows=32)
    engine.run([dynamic.log_of(dynamic.churning_steps(60))], checkpoint=tmp_path / "run")
    call(0, "export", tmp_path / "run", tmp_path / "t.safetensors", "--format", "safetensors", "--rows", rows)
    tensors = load_file(tmp_path / "t.safetensors")
    assert tensors["user/keys"].tolist() == engine.keys("user").to_pylist()
    weights = tensors["user/parameters"]
    assert (weights.shape, weights.dtype.name) == ((len(tensors["user/keys"]), width), dtype)
    assert weights.tobytes() == ENCODINGS[rows].encode(engine.lookup("user", tensors["user/keys"])).tobytes()

    static = engine_of()
    static.save(tmp_path / "static")
    call(0, "export", tmp_path / "static", tmp_path / "o", "--format", "orbax", "--rows", rows)
    tree = orbax.PyTreeCheckpointer().restore(tmp_path / "o")
    assert set(tree["user"]) == {"parameters"}
    assert (
        np.asarray(tree["user"]["parameters"]).tobytes()
        == ENCODINGS[rows].encode(static.lookup("user", range(ROWS))).tobytes()
    )


def test_orbax_out_and_in_is_the_same_table(saved, tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint", reason="an extra: pip install 'penstock[orbax]'")
    folder, engine = saved
    assert outcome(capsys, "export", folder, tmp_path / "o", "--format", "orbax")[0] == 0
    assert outcome(capsys, "export", folder, tmp_path / "o", "--format", "orbax")[0] == 2  # it is there already
    other = engine_of()
    other.read_tables(tmp_path / "o")
    for name in ("user", "item"):
        for key, rows in engine.retrieve_parameters(name).items():
            assert other.retrieve_parameters(name)[key].tobytes() == rows.tobytes()


def test_orbax_tables_that_do_not_fit_are_refused_by_name(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="an extra: pip install 'penstock[orbax]'")
    rows = np.zeros((3, 2), np.float32)
    for number, (tree, problem) in enumerate(
        [
            ({"user": {"parameters": rows}}, "table 'user', parameters: 'user/parameters': expected shape"),
            ({"user": {"parameters": np.zeros((ROWS, 4), np.float32), "accumulators": rows}}, "user/accumulators"),
            ({"u": {"x": rows}}, "no weights of table 'user'"),
        ]
    ):
        save_tree(tmp_path / str(number), tree)
        with pytest.raises(ps.InputError, match=problem):
            engine_of().read_tables(tmp_path / str(number))


def test_without_orbax_one_line_says_what_to_install(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    code, result, _ = outcome(capsys, "export", saved[0], tmp_path / "o", "--format", "orbax")
    assert code == 2
    assert "pip install 'penstock[orbax]'" in result["error"]
