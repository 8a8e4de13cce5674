"""Initial vectors of tables in the files of other libraries."""

import numpy as np
import pytest

import penstock as ps

ROWS, DIM = 40, 4
VECTORS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
KEYS = np.random.default_rng(1).permutation(np.arange(ROWS, dtype=np.int64) * 10**15 - 10**15)


def safetensors(path, tensors):
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def torch(path, tensors):
    library = pytest.importorskip("torch")
    library.save({name: library.from_numpy(array) for name, array in tensors.items()}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def config_of(path, **more):
    return ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(ROWS, DIM, ps.FromFile(path), ps.Adagrad(0.1), "sum", "word", **more)]
    )


def apply(engine, keys):
    engine.apply({"word": (keys, np.ones((len(keys), DIM), np.float32))})


@pytest.mark.parametrize("write", [safetensors, torch])
def test_rows_and_keys_start_from_the_tensor(tmp_path, write):
    static = ps.Engine(config_of(write(tmp_path / "static", {"word.weight": VECTORS, "other.weight": VECTORS + 1})))
    dynamic = ps.Engine(config_of(write(tmp_path / "dynamic", {"rows": VECTORS, "keys": KEYS}), dynamic=ps.Dynamic()))
    for engine, keys in ((static, np.arange(ROWS)), (dynamic, KEYS)):
        assert engine.lookup("word", keys).tobytes() == VECTORS.tobytes()
        apply(engine, keys[:3])
        engine.save(tmp_path / "state" / str(len(keys[0].tobytes())))
        assert engine.lookup("word", keys[3:]).tobytes() == VECTORS[3:].tobytes()
        assert (engine.lookup("word", keys[:3]) != VECTORS[:3]).any(axis=1).all()
        apply(engine, keys[5:6])  # a key that arrives later
        step = engine.lookup("word", keys[5:6]) - VECTORS[5]
        np.testing.assert_allclose(step, engine.lookup("word", keys[:1]) - VECTORS[0], atol=1e-6)


@pytest.mark.parametrize("write", [safetensors, torch])
def test_a_file_that_does_not_fit_is_one_line(tmp_path, write):
    spoilt = VECTORS.copy()
    spoilt[5, 1] = np.nan
    for number, (tensors, problem) in enumerate((
        ({"word": VECTORS[:, :3]}, "expected shape (at most 40, 4), got (40, 3)"),
        ({"word": VECTORS.astype(np.float16)}, "expected float32, got float16; convert the vectors first"),
        ({"word": spoilt}, "expected a number that is finite, got nan"),
        ({"a": VECTORS, "b": VECTORS}, "expected one tensor of vectors, or one that is named like table 'word'"),
    )):  # fmt: skip
        path = write(tmp_path / str(number), tensors)
        with pytest.raises(ps.InputError) as raised:
            ps.Engine(config_of(path))
        assert str(raised.value).startswith(f"{path}:")
        assert problem in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("write", [safetensors, torch])
def test_a_truncated_file_is_one_line(tmp_path, write):
    path = write(tmp_path / "vectors", {"word": VECTORS})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ps.InputError) as raised:
        ps.Engine(config_of(path))
    assert str(raised.value).startswith(f"{path}:")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("write", [safetensors, torch])
def test_a_commit_needs_its_vectors(tmp_path, write):
    path = write(tmp_path / "vectors", {"rows": VECTORS, "keys": KEYS})
    engine = ps.Engine(config_of(path, dynamic=ps.Dynamic()))
    engine.save(tmp_path / "state")
    assert ps.Engine.restore(tmp_path / "state").lookup("word", KEYS).tobytes() == VECTORS.tobytes()
    write(tmp_path / "vectors", {"rows": VECTORS + 1, "keys": KEYS})
    with pytest.raises(ps.StateError, match="has changed"):
        ps.Engine.restore(tmp_path / "state")
    path.unlink()
    with pytest.raises(ps.StateError, match="No such file"):
        ps.Engine.restore(tmp_path / "state")
